"""Rollouts for Megatron-LM's RL loop in place of those that its inference engine samples, which needs a GPU.

Groups of a prompt, whose trajectories branch again after a first turn; some rollouts have two turns, the second of
which repeats the first, with and without the token that ended it. Rewards, lengths and the engine's log-probabilities
are drawn anew for each iteration.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import math
import sys
from typing import Any

import numpy as np
import torch

PAD = 1


def _copied(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.clone()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Exchanges ``get_environment_rollouts`` of ``megatron.rl.rl_utils`` as soon as that is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "megatron.rl.rl_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _exchange(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _exchange(rl_utils: Any) -> None:
    rl_utils.get_environment_rollouts = made_rollouts
    rl_utils.rl_inference_interface_shutdown = lambda: None


def exchange_rollouts() -> None:
    """Have the loop take made rollouts, and keep its weights apart from those of the reference.

    It keeps both with ``Tensor.cpu``, which copies from a GPU, but not if the model is on the CPU already.
    """
    torch.Tensor.cpu = _copied  # type: ignore[method-assign, assignment]
    if "megatron.rl.rl_utils" in sys.modules:  # as in forked ranks
        _exchange(sys.modules["megatron.rl.rl_utils"])
    else:
        sys.meta_path.insert(0, _AfterImport())


def made_rollouts(model: Any, inference_model: Any, optimizer: Any, prompts: int, members: int) -> Any:
    from megatron.rl.agent.api import TokenRollout
    from megatron.training import get_args, get_tokenizer

    args, tokenizer = get_args(), get_tokenizer()
    tokenizer._tokenizer._pad_id, tokenizer._tokenizer.bos_id = PAD, None
    end, vocab = tokenizer.eod, args.vocab_size
    rng = np.random.default_rng([args.seed, args.curr_iteration])

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(2, vocab - 1, size=rng.integers(low, high)).tolist()

    def logprobs(count: int) -> list[float]:
        return np.minimum(-math.log(vocab) + 0.3 * rng.standard_normal(count), 0).tolist()

    # Newer loops need the engine's record of each turn's request, and return the records with the groups.
    with_records = "completion_ids" in TokenRollout.model_fields
    records: dict[str, Any] = {}

    def about(turns: int) -> dict[str, Any]:
        if not with_records:
            epochs = [[(0, 0)] for _ in range(turns)]
            return {"policy_epoch": epochs, "kv_cache_epoch": epochs, "num_evictions": [0] * turns}
        from megatron.core.inference.inference_request import FinishedRequestRecord

        names = [str(len(records) + turn) for turn in range(turns)]
        records.update((name, FinishedRequestRecord([(0, 0)], [(0, 0)], 0)) for name in names)
        return {"completion_ids": names}

    groups = []
    for _ in range(prompts):
        prompt, turns = tokens(6, 16), [tokens(2, 8) for _ in range(2)]
        group = []
        for member in range(members):
            first = prompt + turns[member % 2]
            answer = [*tokens(1, 12), end]
            trajectory = [first + answer]
            mask = [[False] * len(prompt) + [True] * (len(trajectory[0]) - len(prompt))]
            if member % 3 == 2:  # another turn, with its history
                question, reply = tokens(1, 4), [*tokens(1, 8), end]
                history = trajectory[0][: len(trajectory[0]) - member // 3] + question
                trajectory.append(history + reply)
                mask.append([False] * len(history) + [True] * len(reply))
            group.append(
                TokenRollout(
                    trajectory=trajectory,
                    reward=float(rng.choice([0.0, 0.3, 1.0])),
                    generation_mask=mask,
                    logprobs=[logprobs(sum(one)) for one in mask],
                    env_id="made",
                    problem_id=str(len(groups)),
                    **about(len(trajectory)),
                )
            )
        groups.append(group)
    return (groups, records) if with_records else groups
