"""Savings by folding: a step folded and unfolded, on the same batch in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.mcore.engine.forward_step import ForwardStep
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.objective import plain
from mcore_prefix_tree.mcore.engine.schedule import run_schedule
from mcore_prefix_tree.mcore.engine.steps import fold_step
from mcore_prefix_tree.mcore.engine.unfolded import (
    plan_unfolded,
    stock_forward_step,
    why_stock_does_not_fit,
)
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.memory import PeakMemory
from mcore_prefix_tree.plan import Bound, Counts
from mcore_prefix_tree.sample import Sample, Tempered


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One way to run a batch.

    Attributes:
        name: name of the way.
        seconds: time of each round on its slowest rank: the host's planning, forward and backward of the whole batch.
        peak_bytes: peak memory of the rank that needed most, beyond model and optimizer; None where it is unknown.
        tokens: tokens computed, over all data-parallel ranks, without padding.
    """

    name: str
    seconds: list[float]
    peak_bytes: int | None
    tokens: int

    @property
    def median_seconds(self) -> float:
        """Median time over the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Folded against two unfolded ways.

    Attributes:
        folded: measurement of the batch as ``train`` runs it.
        packed: measurement with the same back-end, head and budget, but every sample a tree of its own: a packed varlen
            batch.
        stock: measurement with Megatron's own attention and cross-entropy, one sample a micro-batch; None where it
            cannot hold the longest sample. It projects all positions to the vocabulary, which the fused head of the
            others does not.
        stock_missing: reason why ``stock`` is None, in that case.
        logical_tokens: tokens of the batch.
        bound: largest gain of folding over ``packed``, and so over the faster of both unfolded ways.
    """

    folded: Measurement
    packed: Measurement
    stock: Measurement | None
    stock_missing: str | None
    logical_tokens: int
    bound: Bound

    @property
    def fold_ratio(self) -> float:
        """Ratio of logical to physical tokens."""
        return self.logical_tokens / max(self.folded.tokens, 1)

    @property
    def speedups(self) -> list[float]:
        """Speed of folded over the faster unfolded way in each round, ascending."""
        unfolded_ways = [way for way in (self.packed, self.stock) if way is not None]
        fastest = min(unfolded_ways, key=lambda way: way.median_seconds)
        return sorted(unfolded / folded for unfolded, folded in zip(fastest.seconds, self.folded.seconds, strict=True))

    @property
    def speedup(self) -> float:
        """Median speed-up of the rounds."""
        return statistics.median(self.speedups)

    @property
    def share_of_bound(self) -> float:
        """Ratio of the speed-up to its bound."""
        return self.speedup / self.bound.ratio


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way to run the batch: micro-batches made anew each time, as in a step, and their forward step."""

    name: str
    tokens: int
    make: Callable[[], list[Any]]
    step: ForwardStep


def compare(
    chunks: Sequence[Any],
    samples: Sequence[Sample],
    job: Job,
    *,
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Measure forward and backward of the supervised loss, or of a scalar head's (:func:`plain`); no optimizer step.
    The gradient buffers of ``chunks`` are left empty.

    A first round warms up and measures memory. The timed rounds run the three ways in turn, so that a machine whose
    speed drifts slows all of them.

    Args:
        chunks: model chunks in Megatron's DDP.
        samples: samples of the whole batch.
        job: job of the chunks.
        repeats: number of timed rounds.
        progress: callback that receives how many runs of the batch are done, and their number.
    """
    job, samples = plain(job, samples)

    def folded_step(samples: Sequence[Sample]) -> list[MicroBatch]:
        return fold_step(samples, job).micro_batches

    alone = [
        Sample(
            tokens=sample.tokens,
            loss_mask=sample.loss_mask,
            merge_key=Tempered(temperature=sample.temperature, key=index),
            source=sample.source,
            signals=sample.signals,
        )
        for index, sample in enumerate(samples)
    ]
    logical = sum(len(sample) for sample in samples)
    work, layouts = job.work, [batch.layout for batch in folded_step(samples)]
    folded, unfolded = (
        over_ranks(counts, job)
        for counts in (Counts.folded(layouts, work.window), Counts.unfolded(layouts, work.window))
    )
    ways = [
        _Way(
            name="folded",
            tokens=folded.tokens,
            make=lambda: folded_step(samples),
            step=job.forward_step,
        ),
        _Way(
            name="unfolded, packed",
            tokens=logical,
            make=lambda: folded_step(alone),
            step=job.forward_step,
        ),
    ]
    stock_missing = why_stock_does_not_fit(samples, job)
    if stock_missing is None:
        ways.append(
            _Way(
                name="unfolded, stock",
                tokens=logical,
                make=lambda: plan_unfolded(samples, job).micro_batches,
                step=partial(stock_forward_step, of_values=job.objective.has_scalar_head),
            )
        )
    done = 0

    def seconds(way: _Way) -> float:
        nonlocal done
        found = _seconds(way, chunks, job)
        done += 1
        if progress is not None:
            progress(done, (1 + repeats) * len(ways))
        return found

    peaks = []
    for way in ways:
        peak = PeakMemory(job.folding.device)
        seconds(way)
        peaks.append(int(_largest(float(peak.bytes() or 0), job)) or None)
    rounds = [[seconds(way) for way in ways] for _ in range(repeats)]
    measured = [
        Measurement(name=way.name, seconds=list(seconds), peak_bytes=peak, tokens=way.tokens)
        for way, peak, seconds in zip(ways, peaks, zip(*rounds, strict=True), strict=True)
    ]
    return Comparison(
        folded=measured[0],
        packed=measured[1],
        stock=measured[2] if stock_missing is None else None,
        stock_missing=stock_missing,
        logical_tokens=logical,
        bound=Bound(folded=work.of(folded), unfolded=work.of(unfolded)),
    )


def over_ranks(counts: Counts, job: Job) -> Counts:
    """Sum counts over the data-parallel ranks."""
    total = torch.tensor(counts, device=job.folding.device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return Counts(*total.tolist())


def _seconds(way: _Way, chunks: Sequence[Any], job: Job) -> float:
    dist.barrier()
    started = time.perf_counter()
    run_schedule(chunks, way.make(), way.step)
    if job.folding.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    for chunk in chunks:
        chunk.zero_grad_buffer()
    # In a real step every rank waits for the slowest.
    return _largest(seconds, job)


def _largest(value: float, job: Job) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=job.folding.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
