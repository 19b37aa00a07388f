"""The loss of ``train_rl.py`` as an objective of folded micro-batches: its functions, and trajectories.

Entry t of an array of token values belongs to ``tokens[t]``; Megatron-LM's tensors of log-probabilities begin with
the second token, and so are one shorter.

Legend: n tokens of a trajectory, k of them scored; K scored tokens of a micro-batch.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.mcore import release
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import checkout
from mcore_prefix_tree.objectives import LossOutput, Objective, Targets
from mcore_prefix_tree.objectives.scored import ScoredTokens
from mcore_prefix_tree.objectives.scored_rows import Rows
from mcore_prefix_tree.sample import Sample

# Parameters of the script's loss_func, in this order.
_LOSS = ["loss_mask", "kl_term", "ratios", "entropy_term", "truncated_from_above", "truncated_from_below"]


@cache
def load_loss_func() -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    """Return ``loss_func`` of the checkout's script: from a mask, terms and the loss to the logged values.

    Raises ArgumentError without a script that folding can train.
    """
    file = checkout() / "train_rl.py"
    if not file.is_file():
        raise ArgumentError(
            f"{file} is missing: Megatron-LM {release.installed_version()} has no loop for reinforcement learning; "
            "check out core_v0.19.0"
        )
    try:
        script = importlib.import_module("train_rl")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"{file} needs the package {error.name}, which is not installed; pip install wandb openai fastapi uvicorn "
            "httpx, and the other packages that its environments import"
        ) from error
    parameters = list(inspect.signature(script.loss_func).parameters)
    if parameters != [*_LOSS, "output_tensor"]:
        raise ArgumentError(
            f"loss_func of {file} takes {', '.join(parameters)}, not the {', '.join(_LOSS)} and output_tensor of "
            "core_v0.19.0; check out core_v0.19.0"
        )
    loss_func: Callable[..., tuple[Any, Any, dict[str, Any]]] = script.loss_func
    return loss_func


# In the order of train_rl.py's own unpacking of a batch.
OLD, REFERENCE, INFERENCE = "old_logprobs", "ref_logprobs", "inference_logprobs"
_MASK, _ADVANTAGE = "loss_mask", "advantage"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One trajectory without its padding; cut behind its last scored token, since nothing reads later ones.

    ``tokens`` are ``[n]``, n >= 1; ``loss_mask`` is ``[n]``, 0 for the first; ``columns`` hold values of scored tokens,
    ``[k]`` each.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    advantage: float
    columns: Mapping[str, npt.NDArray[np.floating]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopMicroBatch:
    """One of Megatron-LM's micro-batches, with its numbers of scored ``tokens``, at least 1, and of sequences.

    ``dtypes`` are those of the tensors that the columns were taken from.
    """

    trajectories: tuple[Trajectory, ...]
    tokens: float
    sequences: int
    dtypes: Mapping[str, torch.dtype]


def read_micro_batch(batch: Any, *, packed: bool, corrects: bool) -> LoopMicroBatch:
    """Read a micro-batch that Megatron-LM's data iterator returned: tensors of padded rows, or the number of a bin.

    ``packed`` and ``corrects`` are ``--rl-use-sequence-packing`` and ``--rl-inference-logprobs-is-correction``.
    """
    if packed:
        from megatron.rl.rl_utils import get_rl_runtime_state, load_packed_data_by_index

        bins = get_rl_runtime_state().packing_context
        values = load_packed_data_by_index(batch[0].item(), bins, corrects)
        tokens, advantages, old, mask, _, reference, inference, starts, lengths, _, _ = values
        # Of the first token of a bin there is no mask, and nothing scores it.
        mask = torch.nn.functional.pad(mask, (1, 0))
        spans = [(0, start, length) for start, length in zip(starts, lengths, strict=False)]
    else:
        tokens, advantages, old, mask, _, reference, inference = batch
        spans = [(row, 0, tokens.shape[1]) for row in range(len(tokens))]
    columns = {OLD: old, REFERENCE: reference} | ({INFERENCE: inference} if corrects and inference is not None else {})
    host = {name: _on_host(values) for name, values in columns.items()}
    ids, masks, advantage = tokens.cpu().numpy(), mask.float().cpu().numpy(), _on_host(advantages)
    return LoopMicroBatch(
        trajectories=tuple(
            _trajectory(
                ids[row, start : start + length],
                masks[row, start : start + length],
                float(advantage[at]),
                {name: values[row, start : start + length - 1] for name, values in host.items()},
            )
            for at, (row, start, length) in enumerate(spans)
        ),
        tokens=float(masks[:, 1:].sum()) or 1.0,
        sequences=len(spans),
        dtypes={name: values.dtype for name, values in columns.items()},
    )


def _on_host(values: torch.Tensor) -> npt.NDArray[np.floating]:
    """Return a tensor of any shape as an array on the host; NumPy has no bfloat16."""
    wide = values.float() if values.dtype.itemsize < 4 else values
    found: npt.NDArray[np.floating] = wide.cpu().numpy()
    return found


def _trajectory(
    ids: npt.NDArray[np.int64],
    mask: npt.NDArray[np.float32],
    advantage: float,
    columns: Mapping[str, npt.NDArray[np.floating]],
) -> Trajectory:
    """Cut one out of its row; a trajectory without a scored token keeps its first."""
    scored = np.flatnonzero(mask[1:]) + 1
    length = int(scored[-1]) + 1 if len(scored) else 1
    kept = mask[:length].copy()
    kept[:1] = 0  # nothing predicts it
    tokens = ids[:length] if len(ids) else np.zeros(1, dtype=np.int64)
    return Trajectory(
        tokens=tokens,
        loss_mask=kept if len(ids) else np.zeros(1, dtype=np.float32),
        advantage=advantage,
        columns={name: values[scored - 1] for name, values in columns.items()},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScriptLoss(LossOutput):
    """The weighted sum, and the arguments of the script's ``loss_func``, ``[K]`` each."""

    terms: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScriptObjective(Objective):
    """``calculate_grpo_loss`` of the checkout, with the arguments that ``train_rl.py`` gives it.

    Its terms belong to single tokens, so each token of a trajectory is a separate row. ``dtypes`` are those in which
    the loop keeps each kind of log-probabilities, and computes with them.
    """

    args: argparse.Namespace
    dtypes: Mapping[str, torch.dtype]

    def step_targets(
        self, samples: Sequence[Sample], trajectories: Sequence[Trajectory], weight: Sequence[float]
    ) -> Targets:
        """Return the targets of a step's losses; ``weight`` is that of each trajectory's tokens, all ranks together."""
        scored = ScoredTokens.of(samples)
        columns = {name: np.concatenate([one.columns[name] for one in trajectories]) for name in self.dtypes}
        columns[_MASK] = scored.mask
        columns[_ADVANTAGE] = np.array([one.advantage for one in trajectories])[scored.sample]
        return Targets(
            scored=scored,
            weight=scored.mask * np.asarray(weight)[scored.sample],
            count=np.zeros(len(samples), dtype=np.int64),  # Megatron's micro-batches know their own divisors
            columns=columns,
        )

    def targets(self, samples: Sequence[Sample]) -> Targets:
        raise NotImplementedError("the targets of the loss come with the loop's own micro-batches; see step_targets")

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> ScriptLoss:
        """Return the loss of scores ``[K]``."""
        from megatron.rl.rl_utils import calculate_grpo_loss

        args, columns = self.args, rows.columns
        of_loop = self.dtypes[OLD]
        given = {name: columns[name].to(dtype)[:, None] for name, dtype in self.dtypes.items()}
        losses, *terms = calculate_grpo_loss(
            # Rounded as the loop's own are: without a step between, the ratio of both is 1.
            current_logprobs=scores[rows.token].to(of_loop)[:, None],
            old_logprobs=given[OLD],
            ref_logprobs=given[REFERENCE],
            advantages=columns[_ADVANTAGE].to(of_loop),
            clamp_eps_lower=args.grpo_clamp_eps_lower,
            clamp_eps_upper=args.grpo_clamp_eps_upper,
            kl_beta=args.grpo_kl_beta,
            entropy_weight=args.grpo_entropy_term_weight,
            inference_logprobs=given.get(INFERENCE),
            is_truncation_coef=args.rl_importance_sampling_truncation_coef,
        )
        per_token = losses[:, 0]
        wide = per_token.to(torch.promote_types(per_token.dtype, torch.float32))
        reported = (columns[_MASK].float(), *(term[:, 0].detach() for term in terms), per_token.detach())
        return ScriptLoss(loss=torch.dot(wide, rows.weight.to(wide.dtype)), terms=reported)
