"""A step's samples, dealt as exactly the micro-batches that Megatron's calculator says a step has.

Megatron counts in ``--micro-batch-size``: a step is ``get_num_microbatches()`` micro-batches per rank, and when it is
done ``get_num_microbatches() * micro_batch_size * data_parallel_size`` samples count as consumed, for the learning
rate, the logs, the checkpoints and a batch-size ramp-up. So that all of this stays exact and nothing of Megatron has
to change, a step takes that many logical samples and folds them into that many micro-batches: ``--micro-batch-size``
sets how many samples are folded into one on average, and the plan decides which. The other ways were worse: changing
the calculator between steps trips an assertion in ``train()`` and every count after it, and ``train()`` takes its
schedule function from megatron-core by name, so that there is no seam to wrap it at.

The count cannot grow with the data. A step that does not fit its micro-batches under ``--prefix-tree-max-tokens`` is
refused: before training starts if the samples are in memory; if they are streamed, when it is planned, a step ahead, or
by ``--prefix-tree-dry-run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.step_planner import FoldedStep, StepPlanner, fold_step
from mcore_prefix_tree.mcore.outputs import Readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, WaitingMicroBatch
from mcore_prefix_tree.objectives import LossOutput, Objective
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Size of a step: micro-batches per data-parallel rank, and Megatron's average number of samples in each."""

    micro_batches: int
    micro_batch_size: int
    dp_size: int

    @property
    def samples(self) -> int:
        """Number of logical samples in the step, over all ranks."""
        return self.micro_batches * self.micro_batch_size * self.dp_size


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Figures that a step adds to Megatron's log line: tokens of all ranks, physical ones without padding.

    ``*_before`` are those of the training step before; its ``seconds_before`` reach from its first micro-batch to this
    one's, without evaluation and checkpoints, and are 0 at the first.
    """

    logical_tokens: int
    physical_tokens: int
    seconds_before: float = 0.0
    logical_before: int = 0
    physical_before: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMicroBatch:
    """A micro-batch and the step it belongs to.

    Attributes:
        step: dealt step, on the host. Megatron's iterator keeps it until the step ends, to repeat it if necessary.
        index: index of the micro-batch in the step.
        readout: readout that the last pipeline stage is asked for.
        host_seconds: seconds that this rank spent on planning and folding the step.
        share: share of this micro-batch among those of its rank.
        stats: figures of its step; None in evaluation.
        known: metrics that the objective knows before the step runs, as (sum, weight).
    """

    step: DealtStep
    index: int
    readout: Readout[LossOutput]
    host_seconds: float
    share: float
    stats: StepStats | None
    known: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, model: Any) -> MicroBatch:
        """Return the micro-batch on the device; see :meth:`DealtStep.take`."""
        return self.step.take(self.index, model)


def check_fits(samples: Sequence[Sample], size: StepSize, folding: Folding, objective: Objective) -> None:
    """Check that a step's samples fit its micro-batches; this is much cheaper than planning them.

    Raises:
        ArgumentError: they need more; the message names the arguments and the largest ``--micro-batch-size`` that fits.
    """
    needed = folding.fewest_micro_batches(samples, together=objective.together(samples))
    if needed <= size.micro_batches:
        return
    fitting = [
        count
        for count in range(1, size.micro_batch_size)
        if len(samples) % (count * size.dp_size) == 0
        and len(samples) // (count * size.dp_size) >= needed
        and (len(samples) // (count * size.dp_size)) % folding.micro_batch_multiple == 0
    ]
    way_out = f"use --micro-batch-size {fitting[-1]}, or raise" if fitting else "raise"
    raise ArgumentError(
        f"{len(samples)} samples need {needed} micro-batches a rank of at most --prefix-tree-max-tokens="
        f"{folding.max_tokens} tokens, but --micro-batch-size={size.micro_batch_size} on {size.dp_size} data-parallel "
        f"ranks makes {size.micro_batches}; {way_out} --prefix-tree-max-tokens (the first of these samples is "
        f"{samples[0].source})"
    )


class DealtStep:
    """A step's micro-batches of this rank, which wait on the host; a second model adds its part to them first."""

    def __init__(self, batches: Sequence[MicroBatch], job: Job, *, chunks: int) -> None:
        self._batches, self._job, self._chunks = batches, job, chunks
        self._waiting: list[WaitingMicroBatch] = []

    def list_sizes(self) -> list[torch.Size]:
        """Return ``[batch, length]`` of each micro-batch."""
        return [batch.input_ids.shape for batch in self._batches]

    def take(self, index: int, model: Any) -> MicroBatch:
        """Return a micro-batch on the device, to one model chunk after the other."""
        device = self._job.folding.device
        if not self._waiting:
            taught = self._job.hook.before_step(self._batches, partial(self._forward, model))
            self._waiting = [WaitingMicroBatch(batch, device, chunks=self._chunks) for batch in taught]
        return self._waiting[index].take()

    def _forward(self, model: Any, batches: Sequence[MicroBatch]) -> list[Mapping[str, Any]]:
        """Run a student of one stage forward; Megatron's schedule, which is running already, cannot be called again."""
        found = []
        for batch in batches:
            output, loss = self._job.forward_step(iter([batch.on(self._job.folding.device)]), model)
            found.append(loss(output)[2])
        return found


class StepDealer:
    """Deals the micro-batches of one step after another.

    Every rank of a replica computes the same plan from the same samples. Under virtual pipelining the model chunks of
    a rank share a dealer, and a micro-batch on the device. ``num_workers`` processes read streamed samples ahead;
    ``clock`` returns the seconds of training so far, None in evaluation, which is not measured.
    """

    def __init__(
        self,
        order: SampleOrder,
        job: Job,
        *,
        chunks: int = 1,
        num_workers: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._job, self._chunks, self._clock = job, chunks, clock
        self._planner: StepPlanner[StepSize] = StepPlanner(order, self._fold, num_workers=num_workers)
        self._begun: int | None = None  # samples before the step that is dealt
        self._started: float | None = None
        self._seconds = 0.0
        self._step: DealtStep | None = None
        self._stats: StepStats | None = None
        self._known: Mapping[str, tuple[float, float]] = {}

    def micro_batch(self, consumed: int, size: StepSize, index: int) -> StepMicroBatch:
        """Return this rank's micro-batch ``index`` of the step after ``consumed`` samples; see :func:`check_fits`."""
        return StepMicroBatch(
            step=self._step_after(consumed, size),
            index=index,
            readout=self._job.readout,
            host_seconds=self._seconds,
            share=1 / size.micro_batches,
            stats=self._stats,
            known=self._known,
        )

    def list_sizes(self, consumed: int, size: StepSize) -> list[torch.Size]:
        """Return ``[batch, length]`` of each of this rank's micro-batches of the step after ``consumed`` samples."""
        return self._step_after(consumed, size).list_sizes()

    def _step_after(self, consumed: int, size: StepSize) -> DealtStep:
        if consumed != self._begun:
            self._begin(consumed, size)
        assert self._step is not None, "it has begun"
        return self._step

    def _begin(self, consumed: int, size: StepSize) -> None:
        now = self._clock() if self._clock is not None else 0.0
        step = self._planner.step(consumed, size)
        self._step = DealtStep(step.micro_batches, self._job, chunks=self._chunks)
        self._begun, self._seconds, self._known = consumed, step.seconds, step.metrics
        if self._clock is None:
            return
        before = self._stats
        self._stats = StepStats(
            logical_tokens=step.logical_tokens,
            physical_tokens=step.physical_tokens,
            seconds_before=0.0 if self._started is None else now - self._started,
            logical_before=before.logical_tokens if before else 0,
            physical_before=before.physical_tokens if before else 0,
        )
        self._started = now

    def _fold(self, samples: Sequence[Sample], size: StepSize) -> FoldedStep:
        check_fits(samples, size, self._job.folding, self._job.objective)
        trains = self._clock is not None
        return fold_step(samples, self._job, micro_batches=size.micro_batches, trains=trains)


class StepIterator(Iterator[StepMicroBatch]):
    """Endless iterator for Megatron's ``--dataloader-type external``: this rank's micro-batches, step after step.

    The model chunks of the rank share ``dealer``; ``size`` is called at the first micro-batch of each step.
    """

    def __init__(self, dealer: StepDealer, *, consumed: int, size: Callable[[], StepSize]) -> None:
        self._dealer = dealer
        self._consumed = consumed
        self._next_size = size
        self._size = StepSize(micro_batches=0, micro_batch_size=0, dp_size=0)
        self._index = 0

    def __next__(self) -> StepMicroBatch:
        """Return the next micro-batch of the step, or the first of the next step."""
        if self._index == self._size.micro_batches:
            self._consumed += self._size.samples
            self._size, self._index = self._next_size(), 0
        micro_batch = self._dealer.micro_batch(self._consumed, self._size, self._index)
        self._index += 1
        return micro_batch


# Some 15 seconds' worth of samples in memory, on one core.
CHECKED_SAMPLES = 1_000_000


def checked_steps(
    order: SampleOrder, size_at: Callable[[int], StepSize], *, consumed: int, end: int
) -> Iterator[tuple[StepSize, Sequence[Sample]]]:
    """Yield size and samples of the steps that a job is checked for before it starts, each epoch in its own order.

    These are the steps from ``consumed`` samples to ``end``. A longer job is checked for its first
    :data:`CHECKED_SAMPLES`, or for its first epoch if that is more; streamed samples, which are read and encoded for
    this, for the first epoch. ``size_at`` returns the size of the step that begins after so many samples.
    """
    checked = order.samples_per_epoch if order.is_streamed else max(CHECKED_SAMPLES, order.samples_per_epoch)
    start, end = consumed, min(end, consumed + checked)
    while start < end:
        size = size_at(start)
        yield size, order.take(start, size.samples)
        start += size.samples


def check_steps(
    order: SampleOrder,
    size_at: Callable[[int], StepSize],
    folding: Folding,
    objective: Objective,
    *,
    consumed: int,
    end: int,
) -> None:
    """Check that the steps of :func:`checked_steps` fit their micro-batches; raise as :func:`check_fits` does."""
    for size, samples in checked_steps(order, size_at, consumed=consumed, end=end):
        check_fits(samples, size, folding, objective)
