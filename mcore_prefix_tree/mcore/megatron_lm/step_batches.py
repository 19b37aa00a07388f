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

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.utils import get_model_config

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.step_planner import FoldedStep, StepPlanner, fold_step
from mcore_prefix_tree.mcore.outputs import Readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, WaitingMicroBatch
from mcore_prefix_tree.objectives import LossOutput, Objective
from mcore_prefix_tree.plan.cost import words_of_states
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


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMicroBatch:
    """A micro-batch, by its index in a dealt step, which waits on the host; Megatron's iterator may repeat the step.

    ``figures`` are those of its step that the log line, TensorBoard and W&B show with the loss: a numerator and
    denominator each. Megatron sums both over the micro-batches and the data-parallel ranks of a step, divides, and
    averages over ``--log-interval``.
    """

    step: DealtStep
    index: int
    readout: Readout[LossOutput]
    figures: Mapping[str, tuple[float, float]]

    def take(self, model: Any) -> MicroBatch:
        return self.step.take(self.index, model)


def check_fits(samples: Sequence[Sample], size: StepSize, folding: Folding, objective: Objective) -> int:
    """Return the fewest micro-batches per rank that a step's samples need; much cheaper than planning them.

    Raises ArgumentError if it has fewer; the message names the largest ``--micro-batch-size`` that fits.
    """
    needed = folding.fewest_micro_batches(samples, together=objective.together(samples))
    if needed <= size.micro_batches:
        return needed
    per_rank, rest = divmod(len(samples), size.dp_size)
    fitting = [
        count
        for count in range(1, size.micro_batch_size)
        if not (rest or per_rank % count)
        and per_rank // count >= needed
        and per_rank // count % folding.micro_batch_multiple == 0
    ]
    way_out = f"use --micro-batch-size {fitting[-1]}, or raise" if fitting else "raise"
    raise ArgumentError(
        f"{len(samples)} samples need {needed} micro-batches a rank of at most --prefix-tree-max-tokens="
        f"{folding.max_tokens} tokens{words_of_states(folding.cost_model)}, but --micro-batch-size="
        f"{size.micro_batch_size} on {size.dp_size} data-parallel ranks makes {size.micro_batches}; {way_out} "
        "--prefix-tree-max-tokens (the first of these samples is "
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
        self.begin([model])
        return self._waiting[index].take()

    def begin(self, student: Sequence[torch.nn.Module]) -> None:
        """Run the work before the step, unless it has run: stages all at once, before one waits for another."""
        if not self._waiting:
            taught = self._job.hook.before_step(self._batches, partial(self._forward, student))
            device = self._job.folding.device
            self._waiting = [WaitingMicroBatch(batch, device, chunks=self._chunks) for batch in taught]

    def _forward(self, student: Sequence[torch.nn.Module], batches: Sequence[MicroBatch]) -> Any:
        """Run the student forward by a schedule inside that of the step, which has begun."""
        # Of the config, the step's schedule has started the timers, and entered what keeps its gradients from being
        # summed early; a second one would start them again, and end that at its own end.
        config, kept = get_model_config(student[0]), {}
        for name in ("timers", "no_sync_func"):
            kept[name] = getattr(config, name)
            setattr(config, name, None)
        try:
            return self._job.forward(student)(batches)
        finally:
            vars(config).update(kept)


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
        self._step: DealtStep | None = None
        self._figures: dict[str, tuple[float, float]] = {}
        self._before: tuple[float, int, int] | None = None  # the training step before: its start and its tokens

    def iterate(self, *, consumed: int, size: Callable[[], StepSize]) -> Iterator[StepMicroBatch]:
        """Yield this rank's micro-batches, step after step, for Megatron's ``--dataloader-type external``.

        ``size`` is called at the first micro-batch of each step.
        """
        while True:
            now = size()
            for index in range(now.micro_batches):
                step = self.step_after(consumed, now)
                yield StepMicroBatch(step=step, index=index, readout=self._job.readout, figures=self._figures)
            consumed += now.samples

    def step_after(self, consumed: int, size: StepSize) -> DealtStep:
        """Return the step after ``consumed`` samples; see :func:`check_fits`."""
        if consumed != self._begun:
            self._begin(consumed, size)
        assert self._step is not None, "it has begun"
        return self._step

    def _begin(self, consumed: int, size: StepSize) -> None:
        now = self._clock() if self._clock is not None else 0.0
        step = self._planner.step(consumed, size)
        self._step = DealtStep(step.micro_batches, self._job, chunks=self._chunks)
        self._begun, self._figures = consumed, dict(step.metrics)
        if self._clock is None:
            return
        tokens, share = (step.logical_tokens, step.physical_tokens), 1 / size.micro_batches
        self._figures["fold ratio"] = tokens
        if self._before is not None:
            # Those of the step before: a step's end is not known inside it.
            started, logical, physical = self._before
            self._figures["logical tokens/s"] = (logical, now - started)
            self._figures["physical tokens/s"] = (physical, now - started)
        self._figures["plan time (ms)"] = (1e3 * step.seconds * share, share)
        self._before = (now, *tokens)

    def _fold(self, samples: Sequence[Sample], size: StepSize) -> FoldedStep:
        check_fits(samples, size, self._job.folding, self._job.objective)
        trains = self._clock is not None
        return fold_step(samples, self._job, micro_batches=size.micro_batches, trains=trains)


# Some 15 seconds' worth of samples in memory, on one core.
CHECKED_SAMPLES = 1_000_000


class Need(NamedTuple):
    """Demands of a step on the sizes: samples per data-parallel rank, and micro-batches per rank under the budget."""

    samples: int
    micro_batches: int


def check_steps(
    order: SampleOrder,
    size_at: Callable[[int], StepSize],
    folding: Folding,
    objective: Objective,
    *,
    consumed: int = 0,
    end: int,
) -> list[Need]:
    """Return the demands of a job's steps; raise as :func:`check_fits` if one does not fit its micro-batches.

    These are the steps from ``consumed`` samples to ``end``, each epoch in its own order. A longer job is checked for
    its first :data:`CHECKED_SAMPLES`, or for its first epoch if that is more; streamed samples, which are read and
    encoded for this, for the first epoch. ``size_at`` returns the size of the step that begins after so many samples.
    """
    checked = order.samples_per_epoch if order.is_streamed else max(CHECKED_SAMPLES, order.samples_per_epoch)
    start, end, needs = consumed, min(end, consumed + checked), []
    while start < end:
        size = size_at(start)
        needed = check_fits(order.take(start, size.samples), size, folding, objective)
        needs.append(Need(samples=size.samples // size.dp_size, micro_batches=needed))
        start += size.samples
    return needs


@contextmanager
def megatrons_calculator(args: argparse.Namespace) -> Iterator[None]:
    """Set up the calculator of a job from its validated arguments, before Megatron-LM does so and refuses sizes."""
    names = inspect.signature(calculator.init_num_microbatches_calculator).parameters
    calculator.init_num_microbatches_calculator(**{name: getattr(args, name) for name in names})
    try:
        yield
    finally:
        calculator.destroy_num_microbatches_calculator()


def current_size(args: argparse.Namespace) -> StepSize:
    """Return the size of the step that the calculator stands at."""
    return StepSize(
        micro_batches=calculator.get_num_microbatches(),
        micro_batch_size=args.micro_batch_size,
        dp_size=args.data_parallel_size,
    )


def size_at(args: argparse.Namespace, consumed: int) -> StepSize:
    """Move the calculator to so many consumed samples, and return that step's size; refuse one that does not divide."""
    calculator.update_num_microbatches(consumed, consistency_check=True)
    size = current_size(args)
    if size.micro_batches < 1:
        raise ArgumentError(
            f"the step after {consumed:,} samples has {calculator.get_current_global_batch_size()} samples, fewer than "
            f"one micro-batch of --micro-batch-size={size.micro_batch_size} on each of {size.dp_size} data-parallel "
            "ranks; lower --micro-batch-size, or raise the batch size"
        )
    _check_interleaved(args, size)
    return size


def evaluation_size(args: argparse.Namespace) -> StepSize:
    """Return the size that Megatron evaluates with: a step's, or since core_v0.18 that of separate arguments."""
    micro_batch_size = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    samples = getattr(args, "eval_global_batch_size", args.global_batch_size)
    return StepSize(
        micro_batches=samples // (micro_batch_size * args.data_parallel_size),
        micro_batch_size=micro_batch_size,
        dp_size=args.data_parallel_size,
    )


def check_sizes(args: argparse.Namespace) -> None:
    """Check the sizes of all steps and of evaluation, as :func:`size_at` does; the calculator is at the first step."""
    if args.prefix_tree_valid_data_path and args.eval_iters:
        _check_interleaved(args, evaluation_size(args))
    size_at(args, 0)
    consumed = steps = 0
    while not is_constant(args) and (steps < args.train_iters if args.train_iters else consumed < args.train_samples):
        consumed += size_at(args, consumed).samples
        steps += 1


def is_constant(args: argparse.Namespace) -> bool:
    """Return whether all steps have one size."""
    schedules = (getattr(args, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule"))
    return all(schedule is None for schedule in schedules)


def _check_interleaved(args: argparse.Namespace, size: StepSize) -> None:
    # Megatron asks this in its schedule, at the first step.
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    if group > size.micro_batches or 0 < size.micro_batches % group < stages:
        raise ArgumentError(
            f"a step has {size.micro_batches} micro-batches on each rank, but an interleaved pipeline of {stages} "
            f"stages takes them {group} at a time, and at least {stages} in the end; change --global-batch-size or "
            "--micro-batch-size"
        )
