"""Fold ratio of training steps, which is less than that of a complete file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mcore_prefix_tree.plan.forest_plan import ForestPlan
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, sort_samples


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A fold ratio over several steps: logical over physical tokens of all steps, and the extremes of single steps."""

    mean: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, logical: Sequence[int], physical: Sequence[int]) -> Spread:
        ratios = [one / other for one, other in zip(logical, physical, strict=True)]
        return cls(mean=sum(logical) / sum(physical), lowest=min(ratios), highest=max(ratios))


def tokens_without_routes(batches: Iterable[Sequence[Sample]], sharing: Sharing = SHARE_ALL) -> int | None:
    """Return the unique tokens of micro-batches if routes did not matter; None if they do not, or no sample has any."""
    batches = list(batches)
    if sharing.use_first_samples_routes or all(one.signals.routes is None for batch in batches for one in batch):
        return None
    by_tokens = replace(sharing, use_first_samples_routes=True)
    return sum(sum(map(len, batch)) - int(sort_samples(batch, by_tokens)[1].sum()) for batch in batches)


@dataclass(frozen=True, kw_only=True)
class StepsReport:
    """Steps of training; ``samples`` and ``idle_ranks`` are those of an average step.

    ``planned_fold_ratio`` has the context that micro-batches repeat; it and ``idle_ranks`` are None without a plan.
    """

    steps: int
    samples: float
    fold_ratio: Spread
    planned_fold_ratio: Spread | None = None
    idle_ranks: float | None = None


def report_steps(
    steps: Iterable[Sequence[Sample]],
    *,
    sharing: Sharing = SHARE_ALL,
    plan: Callable[[Sequence[Sample]], ForestPlan] | None = None,
) -> StepsReport:
    """Count the folding of at least one step; ``plan`` cuts a step into micro-batches, as training does."""
    samples, logical, physical, planned, idle = 0, [], [], [], 0
    for step in steps:
        samples += len(step)
        _, shared = sort_samples(step, sharing)
        logical.append(sum(map(len, step)))
        physical.append(logical[-1] - int(shared.sum()))
        if plan is not None:
            of_step = plan(step)
            planned.append(sum(map(sum, of_step.physical_tokens)))
            idle += of_step.idle_ranks
    return StepsReport(
        steps=len(logical),
        samples=samples / len(logical),
        fold_ratio=Spread.of(logical, physical),
        planned_fold_ratio=Spread.of(logical, planned) if plan is not None else None,
        idle_ranks=idle / len(logical) if plan is not None else None,
    )
