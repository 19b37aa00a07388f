"""A step's samples, dealt as exactly the micro-batches that Megatron's calculator says a step has.

Megatron counts in ``--micro-batch-size``: a step is ``get_num_microbatches()`` micro-batches a rank, and when it is
done ``get_num_microbatches() * micro_batch_size * data_parallel_size`` samples count as consumed, for the learning
rate, the logs, the checkpoints and a batch-size ramp-up. So that all of this stays exact and nothing of Megatron has
to change, a step takes that many logical samples and folds them into that many micro-batches: ``--micro-batch-size``
says how many samples are folded into one on average, and the plan decides which. The other ways were worse: changing
the calculator between steps trips an assertion in ``train()`` and every count after it, and ``train()`` takes its
schedule function from megatron-core by name, so that there is no seam to wrap it at.

What the count cannot do is grow with the data. A step that does not fit its micro-batches under
``--prefix-tree-max-tokens`` is refused, for the first epoch before training starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.mcore.arguments import ArgumentError
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.plan import ForestPlan, plan_step
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How a step is cut.

    Attributes:
        micro_batches: of each data-parallel rank.
        micro_batch_size: logical samples of each on average, Megatron's.
        dp_size: data-parallel ranks.
    """

    micro_batches: int
    micro_batch_size: int
    dp_size: int

    @property
    def samples(self) -> int:
        """Logical samples of the step, over all ranks."""
        return self.micro_batches * self.micro_batch_size * self.dp_size


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What a step's log line gains.

    Attributes:
        logical_tokens: of all ranks.
        physical_tokens: of all ranks, without padding.
        seconds_before: of the training step before, from its first micro-batch to this one's, without evaluation and
            checkpoints; 0 at the first.
        logical_before: tokens of that step.
        physical_before: tokens of that step.
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
        batch: on the device.
        host_seconds: this rank spent on planning and folding it.
        share: this micro-batch's part of its rank's micro-batches.
        stats: of its step; None in evaluation.
    """

    batch: MicroBatch
    host_seconds: float
    share: float
    stats: StepStats | None


def plan_exactly(samples: list[Sample], size: StepSize, *, max_tokens: int, interleave: int = 1) -> ForestPlan:
    """A plan with ``size.micro_batches`` micro-batches on each rank, some of them empty where fewer would do.

    Raises:
        ArgumentError: the budget asks for more; names the arguments and the largest ``--micro-batch-size`` that fits.
    """
    plan = plan_step(samples, max_tokens=max_tokens, dp_size=size.dp_size, micro_batch_multiple=size.micro_batches)
    if plan.num_micro_batches > size.micro_batches:
        needed = plan_step(samples, max_tokens=max_tokens, dp_size=size.dp_size).num_micro_batches
        fitting = [
            count
            for count in range(1, size.micro_batch_size)
            if len(samples) % (count * size.dp_size) == 0
            and len(samples) // (count * size.dp_size) >= needed
            and (len(samples) // (count * size.dp_size)) % interleave == 0
        ]
        way_out = f"use --micro-batch-size {fitting[-1]}, or raise" if fitting else "raise"
        raise ArgumentError(
            f"{len(samples)} samples need {needed} micro-batches a rank of at most --prefix-tree-max-tokens="
            f"{max_tokens} tokens, but --micro-batch-size={size.micro_batch_size} on {size.dp_size} data-parallel "
            f"ranks makes {size.micro_batches}; {way_out} --prefix-tree-max-tokens (the first of these samples is "
            f"{samples[0].source})"
        )
    return plan


@dataclass(frozen=True, kw_only=True)
class Folding:
    """How this rank folds.

    Attributes:
        max_tokens: physical tokens of a micro-batch.
        dp_rank: this rank's.
        pad_multiple: sequence lengths are a multiple of this.
        interleave: micro-batches a rank come in multiples of this.
        device: of the tensors.
        attention_backend: of the micro-batches.
    """

    max_tokens: int
    dp_rank: int
    pad_multiple: int
    interleave: int
    device: torch.device
    attention_backend: str


class StepDealer:
    """Plans one step at a time and folds its micro-batches as they are asked for.

    Every rank of a replica computes the same plan from the same samples. Under virtual pipelining the model chunks of
    a rank share a dealer: what the first asks for is kept for the others until the next step.

    Args:
        order: of the samples.
        folding: of this rank.
        clock: seconds of training so far; None in evaluation, which is not measured.
    """

    def __init__(self, order: SampleOrder, folding: Folding, *, clock: Callable[[], float] | None = None) -> None:
        self._order = order
        self._folding = folding
        self._clock = clock
        self._started: float | None = None
        self._consumed = -1
        self._stats: StepStats | None = None
        self._samples: list[Sample] = []
        self._plan: ForestPlan | None = None
        self._plan_seconds = 0.0
        self._folded: dict[int, StepMicroBatch] = {}

    def micro_batch(self, consumed: int, size: StepSize, index: int) -> StepMicroBatch:
        """Micro-batch ``index`` of this rank, of the step that follows the first ``consumed`` samples.

        Raises:
            ArgumentError: see :func:`plan_exactly`.
        """
        if consumed != self._consumed:
            self._start(consumed, size)
        if index not in self._folded:
            assert self._plan is not None
            start = time.perf_counter()
            layout = fold(
                [self._samples[i] for i in self._plan.micro_batches[self._folding.dp_rank][index]],
                pad_to_multiple_of=self._folding.pad_multiple,
            )
            batch = MicroBatch.from_layout(
                layout, device=self._folding.device, attention_backend=self._folding.attention_backend
            )
            self._folded[index] = StepMicroBatch(
                batch=batch,
                host_seconds=time.perf_counter() - start + (self._plan_seconds if index == 0 else 0.0),
                share=1 / size.micro_batches,
                stats=self._stats,
            )
        return self._folded[index]

    def _start(self, consumed: int, size: StepSize) -> None:
        now = self._clock() if self._clock is not None else 0.0
        start = time.perf_counter()
        self._samples = self._order.take(consumed, size.samples)
        self._plan = plan_exactly(
            self._samples, size, max_tokens=self._folding.max_tokens, interleave=self._folding.interleave
        )
        self._plan_seconds = time.perf_counter() - start
        self._consumed, self._folded = consumed, {}
        if self._clock is None:
            return
        before = self._stats
        self._stats = StepStats(
            logical_tokens=sum(len(sample) for sample in self._samples),
            physical_tokens=sum(map(sum, self._plan.physical_tokens)),
            seconds_before=0.0 if self._started is None else now - self._started,
            logical_before=before.logical_tokens if before else 0,
            physical_before=before.physical_tokens if before else 0,
        )
        self._started = now


class StepIterator(Iterator[StepMicroBatch]):
    """What Megatron's ``--dataloader-type external`` takes: this rank's micro-batches, step after step, for ever.

    Args:
        dealer: shared by the model chunks of the rank.
        consumed: samples before the first step.
        size: of the step that begins, asked at its first micro-batch.
    """

    def __init__(self, dealer: StepDealer, *, consumed: int, size: Callable[[], StepSize]) -> None:
        self._dealer = dealer
        self._consumed = consumed
        self._next_size = size
        self._size = StepSize(micro_batches=0, micro_batch_size=0, dp_size=0)
        self._index = 0

    def __next__(self) -> StepMicroBatch:
        """The next micro-batch of the step, or the first of the next one."""
        if self._index == self._size.micro_batches:
            self._consumed += self._size.samples
            self._size, self._index = self._next_size(), 0
        micro_batch = self._dealer.micro_batch(self._consumed, self._size, self._index)
        self._index += 1
        return micro_batch


def check_first_epoch(order: SampleOrder, size: StepSize, folding: Folding, *, consumed: int, end: int) -> None:
    """Plan the steps from ``consumed`` samples to ``end``, at most an epoch of them, so that none is refused later.

    Raises:
        ArgumentError: see :func:`plan_exactly`.
    """
    for start in range(consumed, min(end, consumed + order.samples_per_epoch), size.samples):
        plan_exactly(
            order.take(start, size.samples), size, max_tokens=folding.max_tokens, interleave=folding.interleave
        )
