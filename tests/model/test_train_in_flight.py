"""Micro-batches that a step holds at a time, and the thread in which their attention is planned."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train_jobs import VOCAB, rows, train, write_job

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.attention import cascade, flex, path
from mcore_prefix_tree.mcore.seam import core_attention
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, WaitingMicroBatch
from mcore_prefix_tree.metadata import TreeMetadata

# Two steps of nine micro-batches.
MANY = ("batch.max_tokens=18", "train_iters=2", "attention_backend=path")


class Alive:
    """Counts the micro-batches whose rotary rows are in memory, each time that some are gathered."""

    def __init__(self) -> None:
        self.gathered: list[weakref.ref[TreeMetadata]] = []
        self.counts: list[int] = []

    def __call__(self, table: torch.Tensor, metadata: TreeMetadata) -> torch.Tensor:
        self.gathered.append(weakref.ref(metadata))
        self.counts.append(sum(one() is not None for one in self.gathered))
        return attention_rows(table, metadata)


attention_rows = core_attention.rows_by_position


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alive]:
    """Without the collector of cycles: nothing waits for it."""
    counter = Alive()
    monkeypatch.setattr(core_attention, "rows_by_position", counter)
    gc.disable()
    yield counter
    gc.enable()


RECOMPUTE = (
    "model.transformer.recompute_granularity=full",
    "model.transformer.recompute_method=uniform",
    "model.transformer.recompute_num_layers=1",
)


# Recomputation holds a micro-batch as long as its graph, which Megatron's loop drops when it has the next one;
# with megatron-core 0.19 the graph goes earlier.
@pytest.mark.parametrize(("recompute", "most"), [((), 1), (RECOMPUTE, 2)], ids=["kept", "recomputed"])
def test_micro_batch_is_freed_with_its_backward(
    tmp_path: Path, alive: Alive, recompute: tuple[str, ...], most: int
) -> None:
    train(write_job(tmp_path), *MANY, "batch.over_budget=repeat", *recompute)
    assert len(alive.counts) == 9, "all layers of a micro-batch, and their recomputation, share its rows"
    assert 1 <= max(alive.counts) <= most


def test_chunk_of_a_tree_is_freed_with_its_backward(tmp_path: Path, alive: Alive) -> None:
    notes = train(write_job(tmp_path), *MANY, "batch.over_budget=carry")
    assert sum(report.carried_tokens for report in notes.reports) > 0
    assert max(alive.counts) == 1


def test_evaluation_holds_one_micro_batch(tmp_path: Path, alive: Alive) -> None:
    held_out = write_job(tmp_path).parent / "data.jsonl"
    train(write_job(tmp_path), *MANY, f"validation={{path: {held_out}, eval_interval: 1}}")
    assert len(alive.counts) > 24
    assert max(alive.counts) == 1


PLANS = [(path, "_build_plan", "path"), (cascade, "build_plan", "cascade")]


@pytest.mark.parametrize(("module", "name", "backend"), PLANS, ids=[backend for _, _, backend in PLANS])
def test_attention_is_planned_in_the_planning_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, backend: str
) -> None:
    honest, threads = getattr(module, name), []

    def build(metadata: TreeMetadata) -> Any:
        threads.append(threading.current_thread().name)
        return honest(metadata)

    monkeypatch.setattr(module, name, build)
    train(write_job(tmp_path), *MANY, f"attention_backend={backend}")
    assert len(threads) > 8
    of_first_step = threads.index("mcore-prefix-tree ahead_0")  # which nothing precedes
    assert 0 < of_first_step < len(threads) / 2
    assert set(threads[of_first_step:]) == {"mcore-prefix-tree ahead_0"}


def test_windows_of_some_layers_are_planned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on a CPU; its lists are made for both kinds of layers before it is asked."""
    from harness.train_jobs import world_of_one

    from mcore_prefix_tree.mcore.engine.backend import attention_cases_of_model
    from mcore_prefix_tree.settings import load_recipe

    windows = ("model.transformer.window_size=[3, 0]", "model.transformer.window_attn_skip_freq=2")
    with world_of_one(load_recipe(write_job(tmp_path), windows)) as place:
        cases = attention_cases_of_model(place.config, device=place.device, deterministic=True)
    assert sorted(str(case.options.window) for case in cases) == ["4", "None"]
    metadata = TreeMetadata.from_layout(fold([Sample(tokens=[1, 2, 3])]))
    for case in cases:
        flex.plan(metadata, case)
    assert {"flex lists, window None", "flex lists, window 4"} <= metadata.cache.keys()


def waiting(chunks: int) -> WaitingMicroBatch:
    batch = MicroBatch.from_layout(fold([Sample(tokens=row["tokens"]) for row in rows()[:4]]))
    return WaitingMicroBatch(batch, torch.device("cpu"), chunks=chunks)


def test_model_chunks_share_a_micro_batch_until_the_last_has_it() -> None:
    batch = waiting(2)
    first = batch.take()
    taken = weakref.ref(first)
    del first
    assert taken() is not None, "the second chunk has not had it yet"
    assert batch.take() is taken()
    assert taken() is None


def test_a_repeated_step_takes_its_micro_batches_again() -> None:
    batch = waiting(1)
    first, second = batch.take(), batch.take()
    assert first is not second
    assert torch.equal(first.input_ids, second.input_ids)
    assert int(first.input_ids.max()) < VOCAB
