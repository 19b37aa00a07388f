"""Savings by folding: a step folded and unfolded, on the same batch in the same process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.layout.tree_chunks import whole_layouts
from mcore_prefix_tree.mcore.engine.forward_step import ForwardStep
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.stand_ins import make_stand_in, plain, stock_forward_step
from mcore_prefix_tree.mcore.engine.step_parts import make_clocks, marked
from mcore_prefix_tree.mcore.engine.step_planner import fold_step
from mcore_prefix_tree.mcore.engine.unfolded import plan_unfolded, why_stock_does_not_fit
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.plan import Bound, Counts, ExpectedSpeedup, Parts, work_ratios
from mcore_prefix_tree.plan.model_shape import most_unused
from mcore_prefix_tree.sample import Sample, Tempered
from mcore_prefix_tree.utils.memory import PeakMemory

# Rounds after training: the fewest whose median one disturbed round does not move.
ROUNDS = 3
# An unfolded way that took so many times as long as the fastest one is not timed again.
_FAR_SLOWER = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One way to run a batch."""

    name: str  # name of the way
    # Time of each round by parts: the host's planning, forward and backward of the batch. The parts are the mean of the
    # ranks, scaled so that they add up to the time of the slowest one; waiting is body.
    rounds: list[Parts]
    cpu_rounds: list[Parts] | None  # the same in processor time, summed over the ranks; None on a GPU
    # Peak memory of the rank that needed most, beyond model and optimizer; None if it is unknown.
    peak_bytes: int | None
    tokens: int  # tokens computed, over all data-parallel ranks, without padding

    @property
    def seconds(self) -> list[float]:
        """Time of each round on its slowest rank."""
        return [sum(parts) for parts in self.rounds]

    @property
    def cpu_seconds(self) -> list[float] | None:
        """Processor time of each round on all ranks; None on a GPU."""
        return None if self.cpu_rounds is None else [sum(parts) for parts in self.cpu_rounds]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_cpu_seconds(self) -> float | None:
        """Median processor time over the rounds; None on a GPU."""
        return None if self.cpu_seconds is None else statistics.median(self.cpu_seconds)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Gain of folding by one clock: speed-ups of all rounds, ascending, and the largest possible one (``bound``)."""

    speedups: list[float]
    bound: Bound

    @classmethod
    def from_rounds(
        cls, folded: Sequence[Parts], unfolded: Sequence[Parts], others: Sequence[Sequence[Parts]], ratios: Parts
    ) -> Gain:
        """Compare rounds of the folded step with as many rounds of the fastest unfolded way.

        ``others`` are rounds of each unfolded way with the folded step's kernels; ``ratios`` bound each part's gain.
        """
        return cls(
            speedups=sorted(sum(slow) / sum(fast) for slow, fast in zip(unfolded, folded, strict=True)),
            bound=Bound.from_ways(
                statistics.median(map(sum, unfolded)),
                [Parts(*map(statistics.median, zip(*rounds, strict=True))) for rounds in others],
                ratios,
            ),
        )

    @property
    def speedup(self) -> float:
        """Median speed-up of the rounds."""
        return statistics.median(self.speedups)

    @property
    def shares_of_bound(self) -> list[float]:
        """Ratio of each round's speed-up to the bound, ascending; noise of single rounds can lift it above 1."""
        return [speedup / self.bound.ratio for speedup in self.speedups]

    @property
    def share_of_bound(self) -> float:
        """Ratio of the median speed-up to the bound."""
        return self.speedup / self.bound.ratio


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Folded against unfolded ways."""

    folded: Measurement  # the batch, as train runs it
    # The batch as a packed varlen batch: each sample is a separate tree. Back-end, head and budget are those of folded.
    packed: Measurement
    # The packed batch in micro-batches no larger than the folded ones, so that operations have the same sizes; None
    # when packed has the same micro-batches.
    small: Measurement | None
    # Megatron's attention and cross-entropy, with one sample per micro-batch; None when a micro-batch cannot hold the
    # longest sample. Its head projects all positions to the vocabulary; the fused head projects only predictors.
    stock: Measurement | None
    stock_missing: str | None  # reason why stock is None, in that case
    logical_tokens: int  # tokens of the batch
    expected: ExpectedSpeedup  # speed-up to expect by FLOPs over packed
    ratios: Parts  # the most that each part of packed can shrink by

    @property
    def fold_ratio(self) -> float:
        """Ratio of logical to physical tokens."""
        return self.logical_tokens / max(self.folded.tokens, 1)

    @property
    def unfolded(self) -> list[Measurement]:
        return [way for way in (self.packed, self.small, self.stock) if way is not None]

    @property
    def fastest(self) -> Measurement:
        """The fastest of the unfolded ways that ran in every round."""
        every_round = [way for way in self.unfolded if len(way.rounds) == len(self.folded.rounds)]
        return min(every_round, key=lambda way: way.median_seconds)

    @property
    def gain(self) -> Gain:
        """Gain over the fastest unfolded way in time."""
        others = [way.rounds for way in (self.packed, self.small) if way is not None]
        return Gain.from_rounds(self.folded.rounds, self.fastest.rounds, others, self.ratios)

    @property
    def cpu_gain(self) -> Gain | None:
        """Gain over the same way in processor time; None on a GPU."""
        folded, fastest = self.folded.cpu_rounds, self.fastest.cpu_rounds
        if folded is None or fastest is None:
            return None
        others = [way.cpu_rounds for way in (self.packed, self.small) if way is not None and way.cpu_rounds is not None]
        return Gain.from_rounds(folded, fastest, others, self.ratios)


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
    repeats: int = ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Measure forward and backward of the supervised loss, or of a scalar head's (:func:`plain`); no optimizer step.

    A first round warms up and measures memory. The ``repeats`` timed rounds run the ways in turn, every other one
    backwards, so that a machine whose speed drifts slows all of them. An unfolded way that is far slower than another
    is timed once. ``chunks`` are in Megatron's DDP, whose gradient buffers are left empty; ``progress`` receives how
    many runs of the batch are done, and their number.
    """
    job, samples = plain(job, samples)
    ways, stock_missing = _ways(samples, job)
    peaks, rounds = {}, {name: [] for name in ways}  # type: ignore[var-annotated]
    done, total = 0, (1 + repeats) * len(ways)

    def timed(name: str) -> list[Parts]:
        nonlocal done
        found = _timed(ways[name], chunks, job)
        done += 1
        if progress is not None:
            progress(done, total)
        return found

    for name in ways:
        peak = PeakMemory(job.folding.device)
        timed(name)
        peaks[name] = int(_largest(float(peak.bytes() or 0), job)) or None
    names = list(ways)
    for number in range(repeats):
        for name in names[:: -1 if number % 2 else 1]:
            rounds[name].append(timed(name))
        if number == 0:
            seconds = {name: sum(found[0][0]) for name, found in rounds.items()}
            fastest = min(seconds[name] for name in names if name != "folded")
            names = [name for name in names if name == "folded" or seconds[name] <= _FAR_SLOWER * fastest]
            total = done + (repeats - 1) * len(names)
    measured = {
        name: Measurement(
            name=way.name,
            rounds=[found[0] for found in rounds[name]],
            cpu_rounds=[found[1] for found in rounds[name]] if len(rounds[name][0]) > 1 else None,
            peak_bytes=peaks[name],
            tokens=way.tokens,
        )
        for name, way in ways.items()
    }
    # The first pass of trees in chunks is not in these counts: it only takes more time than the bound.
    layouts, limits = whole_layouts([batch.layout for batch in ways["folded"].make()]), job.work.limits
    alone = Counts.unfolded(layouts, *limits)
    lengths = np.concatenate([np.diff(layout.cu_sample_lens) for layout in layouts])
    padded = alone._replace(unused=most_unused(lengths))
    folded, unfolded, padded = (over_ranks(one, job) for one in (Counts.folded(layouts, *limits), alone, padded))
    pads = job.folding.device.type == "cpu" or job.folding.deterministic_attention  # delta rules, in torch
    expected = ExpectedSpeedup(folded=job.work.of(folded), unfolded=job.work.of(unfolded))
    return Comparison(
        folded=measured["folded"],
        packed=measured["packed"],
        small=measured.get("small"),
        stock=measured.get("stock"),
        stock_missing=stock_missing,
        logical_tokens=unfolded.tokens,
        expected=expected,
        ratios=work_ratios(job.work, folded, padded if pads else unfolded),
    )


def _ways(samples: Sequence[Sample], job: Job) -> tuple[dict[str, _Way], str | None]:
    """Return the ways to run a batch by the names of their fields, and the reason if stock is missing."""
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
    logical = sum(map(len, samples))
    plan = job.folding.plan(samples)

    def of_trees(name: str, samples: Sequence[Sample], job: Job, tokens: int) -> _Way:
        return _Way(name=name, tokens=tokens, make=lambda: fold_step(samples, job).micro_batches, step=job.forward_step)

    ways = {
        "folded": of_trees("folded", samples, job, sum(map(sum, plan.physical_tokens))),
        "packed": of_trees("unfolded, packed", alone, job, logical),
    }
    size = max(max(map(max, plan.physical_tokens)), max(map(len, samples)))
    smaller = replace(job, folding=replace(job.folding, max_tokens=size))
    if smaller.folding.plan(alone).micro_batches != job.folding.plan(alone).micro_batches:
        ways["small"] = of_trees("unfolded, small", alone, smaller, logical)
    stock_missing = why_stock_does_not_fit(samples, job)
    if stock_missing is None:
        ways["stock"] = _Way(
            name="unfolded, stock",
            tokens=logical,
            make=lambda: plan_unfolded(samples, job).micro_batches,
            step=partial(stock_forward_step, stand_in=make_stand_in(job)),
        )
    return ways, stock_missing


def over_ranks(counts: Counts, job: Job) -> Counts:
    """Sum counts over the data-parallel ranks."""
    total = torch.tensor(counts, device=job.folding.device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return Counts(*total.tolist())


def _timed(way: _Way, chunks: Sequence[Any], job: Job) -> list[Parts]:
    """Run the batch once; return its parts in time, and on a CPU in processor time too."""
    with marked(chunks, job.config) as marks:
        if job.folding.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        marks.clocks = make_clocks(job.folding.device)
        run_schedule(chunks, way.make(), way.step)
        mine = [clock.parts() for clock in marks.clocks]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    of_time, *of_cpu = zip(*everyone(mine), strict=True)
    time, *cpu = (Parts(*map(sum, zip(*of_ranks, strict=True))) for of_ranks in (_without_waiting(of_time), *of_cpu))
    # In a real step every rank waits for the slowest.
    slowest = _largest(sum(mine[0]), job)
    return [Parts(*(slowest * seconds / sum(time) for seconds in time)), *cpu]


def _without_waiting(of_ranks: Sequence[Parts]) -> list[Parts]:
    """Count as body the time that a rank waits at the end for others; the last rank does not wait."""
    least = min(parts.rest for parts in of_ranks)
    return [parts._replace(body=parts.body + parts.rest - least, rest=least) for parts in of_ranks]


def _largest(value: float, job: Job) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=job.folding.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
