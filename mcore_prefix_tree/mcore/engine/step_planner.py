"""Folding of a step's samples into this rank's micro-batches, and of the next step's while one computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from mcore_prefix_tree.data.batches import SampleOrder, SampleStream
from mcore_prefix_tree.mcore.engine.carried_trees import count_carried_bytes, fold_carrying
from mcore_prefix_tree.mcore.engine.forward_step import divided_by_tokens, with_rows
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import Targets
from mcore_prefix_tree.plan import Carrying
from mcore_prefix_tree.plan.plan_report import tokens_without_routes
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.utils.errors import naming_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedStep:
    """A step of all ranks' samples, and this rank's part of it."""

    samples: Sequence[Sample]
    sample_index: tuple[tuple[int, ...], ...]  # indices of the samples of each of this rank's micro-batches
    micro_batches: list[MicroBatch]  # this rank's micro-batches, on the host, with the plans of the layers' attention
    physical_tokens: int  # unique tokens of the micro-batches of all ranks, without padding
    carried_tokens: int = 0  # tokens of all ranks that a first pass computes in addition, forward only
    carried_bytes: int = 0  # most memory that their keys, values, states and gradients take on a rank
    # Metrics that are known before the step runs, as (sum, weight), the same on every rank: the objective's, and what
    # the fold ratio would be without routes.
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0  # time that this rank took to plan and to fold

    @property
    def logical_tokens(self) -> int:
        return sum(map(len, self.samples))


def fold_step(
    samples: Sequence[Sample], job: Job, *, micro_batches: int | None = None, trains: bool = True
) -> FoldedStep:
    """Plan a step, and fold this data-parallel rank's micro-batches. All stages and tensor-parallel ranks agree on it.

    Each rank has ``micro_batches``, some of them empty if fewer would do; as few as the budget allows by default.
    ``trains`` is whether the step runs backward.

    Raises:
        BudgetError: one sample is longer than the budget, or the two of a pair are.
        SampleError: a sample lacks a field that the objective reads.
    """
    started = time.perf_counter()
    with naming_memory(
        lambda: (
            f"planning a step of {len(samples):,} samples, {sum(map(len, samples)):,} tokens, does not fit; "
            "take fewer samples a step"
        )
    ):
        targets = make_targets(job, samples)
        together = job.objective.together(samples)
        plan = job.folding.plan(samples, micro_batches=micro_batches, together=together, trains=trains)
        mine = plan.micro_batches[job.dp_rank]
        metrics = {} if targets is None else dict(targets.metrics)
        # All chunks of a tree above the budget name the same samples.
        cuts = ([samples[index] for index in cut] for rank in plan.micro_batches for cut in dict.fromkeys(rank))
        unrouted = tokens_without_routes(cuts, job.folding.sharing)
        if unrouted is not None:
            metrics["fold_ratio_without_routes"] = (sum(map(len, samples)), unrouted)
        return FoldedStep(
            samples=samples,
            sample_index=mine,
            micro_batches=fold_micro_batches(samples, mine, job, targets, plan.carrying_of(job.dp_rank)),
            physical_tokens=sum(map(sum, plan.physical_tokens)),
            carried_tokens=plan.carried_tokens,
            carried_bytes=count_carried_bytes(plan, job.folding, job.work, hidden=job.objective.output == "chunks"),
            metrics=metrics,
            seconds=time.perf_counter() - started,
        )


def make_targets(job: Job, samples: Sequence[Sample]) -> Targets | None:
    """Return the targets of a step's losses, None for a weighted sum; raise SampleError if a field is missing."""
    return None if job.objective.is_weighted_sum else job.objective.targets(samples)


def fold_micro_batches(
    samples: Sequence[Sample],
    cut: Sequence[Sequence[int]],
    job: Job,
    targets: Targets | None,
    carrying: Carrying | None = None,
) -> list[MicroBatch]:
    """Fold micro-batches, with the rows that the loss reads; ``cut`` has the indices of each one's samples."""
    batches = fold_carrying(samples, cut, carrying, job.folding)
    if targets is not None:
        batches = [
            with_rows(batch, job.objective, targets, () if batch.forward_only else indices)
            for batch, indices in zip(batches, cut, strict=True)
        ]
    if job.divides_by_tokens:
        scale = sum(map(len, samples)) / max((targets or job.objective.targets(samples)).divisor, 1)
        batches = [divided_by_tokens(batch, scale) for batch in batches]
    return list(job.hook.prepare(batches, carrying))


class StepSize(Protocol):
    """Size of a step."""

    @property
    def samples(self) -> int:
        """Number of samples of all ranks; or of lines, if the order counts those."""


S = TypeVar("S", bound=StepSize)


class StepPlanner(Generic[S]):
    """Reader that plans and folds one step at a time, and the next one while a step computes.

    Steps usually follow each other. One that does not, for example after a batch-size ramp-up or when training is set
    back, is read and planned on request. In a ``with`` block the workers that read ahead end with the block. ``fold``
    is called from another thread; ``consumed`` lets the workers begin at once.
    """

    def __init__(
        self,
        order: SampleOrder,
        fold: Callable[[Sequence[Sample], S], FoldedStep],
        *,
        num_workers: int = 0,
        consumed: int | None = None,
    ) -> None:
        self._order, self._fold, self._num_workers = order, fold, num_workers
        self._stream: SampleStream | None = None
        if consumed is not None:
            self._stream = order.stream(consumed, num_workers=num_workers)
        self._ahead: Ahead[tuple[int, S], FoldedStep] = Ahead(self._make)

    def __enter__(self) -> StepPlanner[S]:
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.close()
        if self._stream is not None:
            self._stream.close()

    def step(self, consumed: int, size: S, *, is_last: bool = False) -> FoldedStep:
        """Return the step that follows the first ``consumed`` samples (or lines), and begin the next, of the same size.

        Raises:
            BudgetError, SampleError: see :func:`fold_step`; an error of a step is raised when that step is requested.
        """
        following = None if is_last else (consumed + size.samples, size)
        return self._ahead.take((consumed, size), then=following)

    def _make(self, place: tuple[int, S]) -> FoldedStep:
        consumed, size = place
        if self._stream is None or self._stream.consumed != consumed:
            if self._stream is not None:
                self._stream.close()
            self._stream = self._order.stream(consumed, num_workers=self._num_workers)
        return self._fold(self._stream.take(size.samples), size)


K = TypeVar("K")
T = TypeVar("T")


class Ahead(Generic[K, T]):
    """Makes steps by name with ``make``, in another thread, one ahead of the step in use.

    The steps that come out are those requested, in any timing, and no two calls of ``make`` overlap. The thread shares
    Python's lock with the training loop, which releases it whenever it waits for a device or for other ranks.
    """

    def __init__(self, make: Callable[[K], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mcore-prefix-tree ahead")
        self._next: tuple[K, Future[T]] | None = None

    def take(self, step: K, *, then: K | None) -> T:
        """Return a step, begun by the last call or made now, or raise ``make``'s exception; begin the step ``then``."""
        made = self._made(step)
        self._next = None if then is None else (then, self._thread.submit(self._make, then))
        return made

    def close(self) -> None:
        """End the thread, once the step in the making is done."""
        self._thread.shutdown(cancel_futures=True)

    def _made(self, step: K) -> T:
        begun, self._next = self._next, None
        if begun is not None:
            # Whether it is the right one or not: nothing is made by two threads at a time.
            wait([begun[1]])
            if begun[0] == step:
                return begun[1].result()
        return self._make(step)
