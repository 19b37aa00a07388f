"""Steps dealt as a fixed number of micro-batches, as Megatron's calculator wants them."""

from __future__ import annotations

import argparse
import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.commands import write_rows

from mcore_prefix_tree import Sample
from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data import LineOptions, StreamedGroups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.megatron_lm import step_batches
from mcore_prefix_tree.mcore.megatron_lm.dry_run import fill_omitted, largest_micro_batch_size
from mcore_prefix_tree.mcore.megatron_lm.step_batches import (
    Need,
    StepDealer,
    StepMicroBatch,
    StepSize,
    check_fits,
    check_steps,
)
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import SupervisedFineTuning
from mcore_prefix_tree.plan import CostModel, ModelWork
from mcore_prefix_tree.trie import SHARE_ALL, Sharing
from mcore_prefix_tree.utils.choices import Order

PROMPT = list(range(20))
SFT = SupervisedFineTuning()


def samples(count: int, *, shared: bool = True) -> list[Sample]:
    """Samples of 25 tokens, the first 20 common."""
    return [
        Sample(tokens=[*PROMPT, *([index] * 5)], merge_key=None if shared else index, source=f"sample {index}")
        for index in range(count)
    ]


def folding(
    *,
    max_tokens: int = 1000,
    dp_size: int = 1,
    pad_multiple: int = 1,
    interleave: int = 1,
    sharing: Sharing = SHARE_ALL,
) -> Folding:
    return Folding(
        max_tokens=max_tokens,
        dp_size=dp_size,
        cost_model=CostModel(token=100.0, pair=1.0),
        padding=Padding(multiple=pad_multiple),
        micro_batch_multiple=interleave,
        sharing=sharing,
        device=torch.device("cpu"),
    )


def job(folding: Folding, dp_rank: int = 0) -> Job:
    work = ModelWork.from_dimensions(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=1000
    )
    return Job(objective=SupervisedFineTuning(), folding=folding, dp_rank=dp_rank, config=None, work=work)


def order(count: int = 32, *, kind: Order = "file") -> SampleOrder:
    return SampleOrder([[sample] for sample in samples(count)], seed=1, order=kind)


def size(micro_batches: int, micro_batch_size: int, dp_size: int = 1) -> StepSize:
    return StepSize(micro_batches=micro_batches, micro_batch_size=micro_batch_size, dp_size=dp_size)


@pytest.mark.parametrize("step", [size(1, 8), size(4, 2), size(8, 1), size(2, 2, 2), size(1, 1, 8)])
def test_a_plan_has_exactly_the_micro_batches_of_the_step(step: StepSize) -> None:
    check_fits(samples(8), step, folding(dp_size=step.dp_size), SFT)
    plan = folding(dp_size=step.dp_size).plan(samples(8), micro_batches=step.micro_batches)
    assert len(plan.micro_batches) == step.dp_size
    assert {len(rank) for rank in plan.micro_batches} == {step.micro_batches}
    assert sorted(chain.from_iterable(chain.from_iterable(plan.micro_batches))) == list(range(8))


def test_too_small_a_budget_names_the_micro_batch_size_that_fits() -> None:
    # 12 samples share nothing: two fit into 50 tokens.
    with pytest.raises(ArgumentError, match=r"need 6 micro-batches .*=50 tokens.* makes 3; use --micro-batch-size 2"):
        check_fits(samples(12, shared=False), size(3, 4), folding(max_tokens=50), SFT)
    # Four stages that interleave want micro-batches in fours.
    with pytest.raises(ArgumentError, match="use --micro-batch-size 1, or raise --prefix-tree-max-tokens"):
        check_fits(samples(12, shared=False), size(4, 3), folding(max_tokens=50, interleave=4), SFT)
    with pytest.raises(ArgumentError, match=r"makes 3; raise --prefix-tree-max-tokens"):
        check_fits(samples(12, shared=False), size(3, 4), folding(max_tokens=50, interleave=5), SFT)


@pytest.mark.parametrize(
    ("steps", "stages", "multiple", "size"),
    [
        ([(64, 1)], 1, 1, 64),
        ([(64, 3)], 1, 1, 16),  # three micro-batches do not divide 64 samples
        ([(64, 1)], 4, 1, 16),
        ([(2, 1)], 4, 1, 1),  # fewer samples than stages
        ([(64, 5)], 2, 2, 8),
        ([(48, 3)], 1, 4, 12),
        ([(32, 1), (48, 1)], 1, 1, 16),  # a ramp-up: each step is divided
        ([(32, 1), (48, 7)], 1, 1, 4),
        ([(64, 64)], 1, 1, 1),
    ],
)
def test_largest_micro_batch_size(steps: list[tuple[int, int]], stages: int, multiple: int, size: int) -> None:
    asked = [Need(samples=samples, micro_batches=needed) for samples, needed in steps]
    assert largest_micro_batch_size(asked, stages=stages, multiple=multiple) == size


def test_omitted_sizes_are_filled_for_validation() -> None:
    def args(**given: int | None) -> argparse.Namespace:
        names = ("micro_batch_size", "seq_length", "encoder_seq_length", "eval_micro_batch_size", "global_batch_size")
        fixed = {"prefix_tree_max_tokens": 900, "max_position_embeddings": 512}
        return argparse.Namespace(**dict.fromkeys(names) | fixed | given)

    both = args(global_batch_size=64)
    assert fill_omitted(both, None) == {"micro_batch_size", "seq_length", "eval_micro_batch_size"}
    assert (both.micro_batch_size, both.seq_length) == (1, 512)
    own = args(global_batch_size=64, eval_micro_batch_size=2, encoder_seq_length=100)
    assert fill_omitted(own, {}) == {"micro_batch_size"}
    given = args(micro_batch_size=4, seq_length=128)
    assert fill_omitted(given, None) == frozenset()
    assert fill_omitted(args(seq_length=128), {"micro_batch_size": 4}) == frozenset()
    with pytest.raises(ArgumentError, match="--global-batch-size is missing, and a dry run cannot find it in the data"):
        fill_omitted(args(seq_length=128), None)


def test_needs_count_each_step_and_reject_small_sizes() -> None:
    # 8 samples that share all but their ends, and 8 that share nothing, two of which fit 50 tokens.
    mixed = SampleOrder([[sample] for sample in samples(8)] + [samples(8, shared=False)], seed=1, order="file")
    found = check_steps(mixed, lambda _: size(4, 1, dp_size=2), folding(max_tokens=50, dp_size=2), SFT, end=16)
    assert [step.samples for step in found] == [4, 4]
    assert found[0].micro_batches < found[1].micro_batches == 2
    with pytest.raises(ArgumentError, match=r"use --micro-batch-size 2, or raise --prefix-tree-max-tokens"):
        check_steps(mixed, lambda _: size(1, 4, dp_size=2), folding(max_tokens=50, dp_size=2), SFT, end=16)


def test_steps_are_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_batches, "CHECKED_SAMPLES", 10_000)
    loners = SampleOrder([[sample] for sample in samples(8)] + [samples(8, shared=False)], seed=1, order="file")
    with pytest.raises(ArgumentError, match="the first of these samples is sample 0"):
        check_steps(loners, lambda _: size(2, 4), folding(max_tokens=75), SFT, consumed=0, end=10**9)
    check_steps(loners, lambda _: size(2, 4), folding(max_tokens=75), SFT, consumed=0, end=8)
    check_steps(loners, lambda _: size(2, 4), folding(max_tokens=100), SFT, consumed=0, end=10**9)


def test_later_epochs_are_checked_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four lines, two of which share nothing: where those meet in a step, it does not fit.
    loners = samples(8, shared=False)
    lines = [samples(4), samples(4), loners[:4], loners[4:]]
    shuffled, step, tight = SampleOrder(lines, seed=4, order="shuffled"), size(2, 4), folding(max_tokens=75)

    def fits(epoch: int) -> bool:
        try:
            check_steps(shuffled, lambda _: step, tight, SFT, consumed=16 * epoch, end=16 * epoch + 16)
        except ArgumentError:
            return False
        return True

    first = next(epoch for epoch in range(100) if not fits(epoch))
    assert first > 0
    with pytest.raises(ArgumentError, match="need"):
        check_steps(shuffled, lambda _: step, tight, SFT, consumed=0, end=10**9)
    check_steps(shuffled, lambda _: step, tight, SFT, consumed=0, end=16 * first)
    monkeypatch.setattr(step_batches, "CHECKED_SAMPLES", 16)
    check_steps(shuffled, lambda _: step, tight, SFT, consumed=0, end=10**9)


def test_micro_batch_leaves_the_device_while_megatron_keeps_it() -> None:
    """Its iterator keeps a step's micro-batches to repeat the step: values derived by attention are not among them."""
    dealer = StepDealer(order(), job(folding()))
    (dealt,) = deal(dealer.iterate(consumed=0, size=lambda: size(1, 4)), 1)
    taken = dealt.take(None)
    metadata = taken.packed_seq_params.tree_metadata
    assert metadata is not None
    metadata.cache["rotary"] = "rows"
    alive = weakref.ref(metadata)
    del taken, metadata
    assert alive() is None
    assert "rotary" not in batch_of(dealt).packed_seq_params.tree_metadata.cache


def batch_of(dealt: StepMicroBatch) -> MicroBatch:
    return dealt.take(None)


def deal(iterator: Iterator[StepMicroBatch], count: int) -> list[StepMicroBatch]:
    return [next(iterator) for _ in range(count)]


def tokens_of(dealt: list[StepMicroBatch]) -> list[list[int]]:
    layouts = [batch_of(micro_batch).layout for micro_batch in dealt]
    rows = [layout.input_ids[layout.sample_tokens(s)] for layout in layouts for s in range(layout.num_samples)]
    return sorted(row.tolist() for row in rows)


def expected(taken: list[Sample]) -> list[list[int]]:
    return sorted(sample.tokens.tolist() for sample in taken)


def test_steps_take_the_samples_that_megatron_counts() -> None:
    source, step = order(kind="shuffled"), size(2, 4, 2)
    ranks = [
        StepDealer(source, job(folding(dp_size=2), dp_rank=r)).iterate(consumed=16, size=lambda: step) for r in range(2)
    ]
    for consumed in (16, 32, 48):
        dealt = [micro_batch for iterator in ranks for micro_batch in deal(iterator, 2)]
        assert tokens_of(dealt) == expected(source.take(consumed, 16))


def test_the_size_of_a_step_is_asked_at_its_beginning() -> None:
    source = order()
    sizes = iter([size(1, 4), size(2, 4), size(4, 4)])
    iterator = StepDealer(source, job(folding())).iterate(consumed=0, size=lambda: next(sizes))
    consumed = 0
    for micro_batches in (1, 2, 4):
        assert tokens_of(deal(iterator, micro_batches)) == expected(source.take(consumed, 4 * micro_batches))
        consumed += 4 * micro_batches


def test_model_chunks_of_a_rank_share_folded_batches() -> None:
    dealer = StepDealer(order(), job(folding()), chunks=2)
    chunks = [dealer.iterate(consumed=0, size=lambda: size(2, 4)) for _ in range(2)]
    for _ in range(3):
        first, second = (deal(chunk, 2) for chunk in chunks)
        assert [id(batch_of(one)) for one in first] == [id(batch_of(one)) for one in second]


def test_sequences_are_padded_and_ranks_without_samples_get_padding() -> None:
    step = size(2, 1, 2)
    dealt = [
        next(
            StepDealer(order(1), job(folding(dp_size=2, pad_multiple=8), dp_rank=r)).iterate(
                consumed=0, size=lambda: step
            )
        )
        for r in range(2)
    ]
    assert all(batch_of(micro_batch).input_ids.shape[1] % 8 == 0 for micro_batch in dealt)
    assert sum(batch_of(micro_batch).layout.num_samples for micro_batch in dealt) <= 4


def test_statistics() -> None:
    now = iter([10.0, 12.5, 13.0])
    iterator = StepDealer(order(), job(folding()), clock=lambda: next(now)).iterate(consumed=0, size=lambda: size(2, 4))
    steps = [deal(iterator, 2) for _ in range(3)]
    figures = [step[0].figures for step in steps]
    assert all(step[0].figures is step[1].figures for step in steps)
    # One of two micro-batches holds everything: cutting would compute the prompt twice.
    logical, physical = 8 * 25, 20 + 8 * 5
    assert all(one["fold ratio"] == (logical, physical) for one in figures)
    assert "logical tokens/s" not in figures[0]
    assert [one["logical tokens/s"] for one in figures[1:]] == [(logical, 2.5), (logical, 0.5)]
    assert [one["physical tokens/s"] for one in figures[1:]] == [(physical, 2.5), (physical, 0.5)]
    milliseconds, share = figures[0]["plan time (ms)"]
    assert np.isclose(2 * share, 1)
    assert milliseconds > 0


def test_less_sharing_reaches_the_micro_batches() -> None:
    """Everything in these samples is scored, so prompts of one token are all there is to share."""
    step = size(2, 4)
    iterators = [
        StepDealer(order(), job(folding(sharing=sharing))).iterate(consumed=0, size=lambda: step)
        for sharing in (SHARE_ALL, Sharing(share="prompt"))
    ]
    dealt = [deal(iterator, 2) for iterator in iterators]
    assert tokens_of(dealt[0]) == tokens_of(dealt[1])
    physical = [sum(batch_of(one).layout.physical_tokens for one in step) for step in dealt]
    assert physical == [20 + 8 * 5, 2 * 1 + 8 * 24]


def test_evaluation_is_not_measured() -> None:
    iterator = StepDealer(order(), job(folding())).iterate(consumed=0, size=lambda: size(2, 4))
    assert not next(iterator).figures


def test_oversized_step_is_reported_at_its_turn() -> None:
    """It is planned while the step before computes, which must not end that one."""
    loners = SampleOrder([[sample] for sample in samples(8)] + [samples(8, shared=False)], seed=1, order="file")
    iterator = StepDealer(loners, job(folding(max_tokens=75))).iterate(consumed=0, size=lambda: size(2, 4))
    assert tokens_of(deal(iterator, 2)) == expected(loners.take(0, 8))
    with pytest.raises(ArgumentError, match="the first of these samples is sample 0"):
        next(iterator)


@pytest.mark.parametrize("method", ["plan", "micro_batch"])
def test_the_next_step_is_planned_and_folded_in_the_background(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    planned: list[str] = []
    ours = folding()
    honest = getattr(Folding, method)

    def plan(self: Folding, *arguments: Any, **options: Any) -> Any:
        if self is ours:  # and not that of a test before, whose next step may still be folded in the background
            planned.append(threading.current_thread().name)
        return honest(self, *arguments, **options)

    monkeypatch.setattr(Folding, method, plan)
    iterator = StepDealer(order(), job(ours)).iterate(consumed=0, size=lambda: size(2, 4))
    for _ in range(3):
        deal(iterator, 2)
    assert planned[0] == threading.main_thread().name
    assert len(planned) >= 3
    first_step = 1 if method == "plan" else 2  # of which nothing can be done before
    assert all("ahead" in name for name in planned[first_step:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streamed_steps_are_those_of_samples_in_memory(tmp_path: Path, num_workers: int) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ({"tokens": sample.tokens.tolist()} for sample in samples(24)))
    streamed = SampleOrder(StreamedGroups(path, LineOptions()), seed=1, order="shuffled")
    source, sizes = order(24, kind="shuffled"), [size(1, 4), size(2, 4), size(2, 4), size(4, 4), size(4, 4)]
    given = iter(sizes)
    dealer = StepDealer(streamed, job(folding()), num_workers=num_workers)
    iterator = dealer.iterate(consumed=5, size=lambda: next(given))
    consumed = 5
    for step in sizes:
        assert tokens_of(deal(iterator, step.micro_batches)) == expected(source.take(consumed, step.samples))
        consumed += step.samples
