"""verl's V1 trainers with complete groups on a rank: registered by the plugin, and verl's own code around the dealing.

Needs the packages of requirements/verl.txt.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("transfer_queue", reason="verl's V1 trainers need requirements/verl.txt")
pytest.importorskip("torchdata", reason="verl's V1 trainers need requirements/verl.txt")
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls

from mcore_prefix_tree.integrations.verl import trainers
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.sample import Sample

GROUPS, ROLLOUTS = 8, 4


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_trainer_is_that_of_verl_with_the_suffix(mode: str) -> None:
    grouped, stock = get_trainer_cls(f"{mode}_grouped"), get_trainer_cls(mode)
    assert issubclass(grouped, stock)
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": f"{mode}_grouped"}}})
    with mock.patch.object(stock, "__init__", autospec=True) as init:
        trainer = grouped(config)
    init.assert_called_once_with(trainer, config)
    assert config.trainer.v1.trainer_mode == mode  # verl compares it, and looks settings up by it


def batch_of(seed: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """A step as verl samples it, not in the order of prompts, and the tokens of each of its rows."""
    rng = np.random.default_rng(seed)
    tokens = {}
    for group in range(GROUPS):
        prompt = rng.integers(100, size=rng.integers(20, 60))
        for session in range(ROLLOUTS):
            answer = rng.integers(100, size=rng.integers(5, 20))
            tokens[f"uid{group}_{session}_0"] = np.concatenate([prompt, answer])
    keys = [list(tokens)[index] for index in rng.permutation(len(tokens))]
    tags = [{"seq_len": len(tokens[key])} for key in keys]
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags), tokens


def trainer_of(mode: str, ranks: int) -> Any:
    """A trainer without its workers."""
    trainer = object.__new__(get_trainer_cls(mode))
    sizes = {"actor": {"ppo_mini_batch_size": GROUPS // 2}, "rollout": {"n": ROLLOUTS}}
    trainer.config = OmegaConf.create({"actor_rollout_ref": sizes, "trainer": {"critic_warmup": 0}})
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    trainer.use_critic, trainer.global_steps = False, 1
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    return trainer


def unique_tokens(rows: list[np.ndarray]) -> int:
    return fold([Sample(tokens=row) for row in rows]).physical_tokens


def mini_batches(keys: list[str], ranks: int) -> Iterator[list[str]]:
    """Rows that verl gives each rank for each of two updates."""
    size = len(keys) // ranks // 2
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_stay_together_in_each_mini_batch(ranks: int) -> None:
    unique = {}
    for mode in ("sync", "sync_grouped"):
        batch, tokens = batch_of()
        metrics: dict[str, Any] = {}

        def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
            assert (partition_id, select_fields) == ("train", ["input_ids"])
            rows = [torch.as_tensor(tokens[key]) for key in keys]  # noqa: B023
            return {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}

        with mock.patch.object(trainers.tq, "kv_batch_get", get):
            dealt = trainer_of(mode, ranks)._balance_batch(batch, metrics)
        assert sorted(dealt.keys) == sorted(tokens)
        assert [tag["seq_len"] for tag in dealt.tags] == [len(tokens[key]) for key in dealt.keys]
        parts = list(mini_batches(dealt.keys, ranks))
        unique[mode] = sum(unique_tokens([tokens[key] for key in part]) for part in parts)
        if mode == "sync_grouped":
            for part in parts:
                assert len({key.split("_")[0] for key in part}) == len(part) // ROLLOUTS
            assert metrics["fold/rank_unique_tokens/max"] <= 1.1 * unique[mode] / ranks
            assert "global_seqlen/balanced_max" in metrics
    whole = sum(
        unique_tokens([row for key, row in tokens.items() if key.startswith(f"uid{g}_")]) for g in range(GROUPS)
    )
    assert unique["sync_grouped"] <= whole < unique["sync"]
