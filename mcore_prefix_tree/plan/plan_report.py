"""Figures of a plan: tokens, cost and balance, next to the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mcore_prefix_tree.layout import NO_PADDING, Padding
from mcore_prefix_tree.layout.forest import NO_BRANCHES, Branching, branching
from mcore_prefix_tree.plan.balance import least_makespan
from mcore_prefix_tree.plan.carry import FORWARD, ForestPlan, TreePart, first_pass_depths
from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN, CostModel
from mcore_prefix_tree.plan.cuts import Int64Array
from mcore_prefix_tree.plan.pack import Leaves, first_scored
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, sort_samples, trie_from_order


@dataclass(frozen=True, kw_only=True)
class MicroBatchReport:
    """One micro-batch; ``padding`` reaches the required size, tokens scored in several micro-batches count in one.

    A chunk of a tree has the samples that end in it, and of the tree's scored tokens as many as of its others. Its
    segments are not counted, also of recurrent layers, which carry their states from chunk to chunk.
    """

    samples: int
    tokens: int
    padding: int
    pairs: int
    scored: int
    cost: float
    segments: int = 0
    segment_levels: int = 0
    segment_states: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan in numbers. Costs are in the unit of the cost model and ignore padding."""

    ranks: tuple[tuple[MicroBatchReport, ...], ...]  # micro-batches by data-parallel rank, then by micro-batch
    logical_tokens: int  # sum of the sample lengths
    unique_tokens: int  # unique tokens of the step; a single micro-batch without a budget would compute as many
    repeated_tokens: int  # tokens that the cuts add to that: context that more than one micro-batch computes
    padding: int
    # slowest, mean: cost of the most expensive rank and of the average one.
    slowest: float
    mean: float
    lower_bound: float  # lower bound of the slowest rank's cost, over all plans
    bubble: float = 0.0  # pipeline bubble that the ranks' costs count, see plan_step
    carried_tokens: int = 0  # tokens that run forward once more, for the chunks of trees above the budget
    # Tokens of such trees that run forward before the step, for a loss of whole samples; the costs of their chunks
    # include it.
    scored_first_tokens: int = 0

    @property
    def imbalance(self) -> float:
        """Slowest rank over the mean, 1 for perfect balance."""
        return self.slowest / self.mean if self.mean else 1.0

    @property
    def over_lower_bound(self) -> float:
        """Slowest rank over the lower bound, 1 for a plan that cannot be better."""
        return self.slowest / self.lower_bound if self.lower_bound else 1.0

    @property
    def idle_ranks(self) -> int:
        return sum(not any(batch.tokens for batch in rank) for rank in self.ranks)

    @property
    def empty_micro_batches(self) -> int:
        """Number of micro-batches without samples, those of idle ranks included."""
        return sum(not batch.tokens for rank in self.ranks for batch in rank)

    @property
    def rank_costs(self) -> list[float]:
        return [rank_cost(rank, self.bubble) for rank in self.ranks]


class _Sums(NamedTuple):
    """A carried tree: its samples, and the visible pairs of tokens before each one, and before each of a first pass."""

    own: Leaves
    chunks: Int64Array
    passes: Int64Array

    @classmethod
    def of(cls, own: Leaves, parts: Sequence[TreePart]) -> _Sums:
        depths = [np.arange(*ends) for ends in zip(own.context.tolist(), own.length.tolist(), strict=True)]
        ahead = first_pass_depths(sorted(part for part in parts if part.is_chunk))
        sums = (np.append(0, np.cumsum(depth + 1)) for depth in (np.concatenate(depths), ahead))
        return cls(own, *sums)


def count_plan(
    everything: Leaves, order: Int64Array, plan: ForestPlan, cost_model: CostModel, padding: Padding = NO_PADDING
) -> tuple[tuple[MicroBatchReport, ...], ...]:
    """Count each rank's micro-batches; ``everything`` has all samples, ``order`` their indices, int64 ``[S]``."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))

    def find_leaves(indices: Sequence[int]) -> Leaves:
        return everything.some(np.sort(place[np.asarray(indices, dtype=np.int64)]))

    def report(
        count: int, tokens: int, pairs: int, scored: int, branches: Branching = NO_BRANCHES, *, passes: float = 1.0
    ) -> MicroBatchReport:
        cost = cost_model.of_micro_batch(tokens, pairs, scored, branches.segments, branches.segment_levels)
        return MicroBatchReport(
            samples=count,
            tokens=tokens,
            padding=padding.size(tokens) - tokens,
            pairs=pairs,
            scored=scored,
            cost=passes * cost,
            **branches._asdict(),
        )

    def count(indices: Sequence[int]) -> MicroBatchReport:
        own = find_leaves(indices)
        branches = branching(trie_from_order(np.arange(len(own)), own.context, own.length).node_parent)
        return report(len(indices), own.tokens, own.pairs, int(own.scored.sum()), branches)

    def count_part(run: TreePart, tree: _Sums, passes: float) -> MicroBatchReport:
        if run.forward_only:
            return report(0, run.tokens, int(tree.passes[run.end] - tree.passes[run.start]), 0, passes=FORWARD)
        own, ends = tree.own, np.cumsum(tree.own.length - tree.own.context)
        ending = int(((ends > run.start) & (ends <= run.end)).sum())
        scored = int(own.scored.sum()) * run.tokens // own.tokens
        pairs = int(tree.chunks[run.end] - tree.chunks[run.start])
        return report(ending, run.tokens, pairs, scored, passes=passes)

    def count_rank(rank: int, cuts: Sequence[tuple[int, ...]]) -> Iterator[MicroBatchReport]:
        carrying = plan.carrying_of(rank)
        if carrying is None:
            yield from map(count, cuts)
            return
        trees = {indices: _Sums.of(find_leaves(indices), parts) for indices, parts in carrying.trees(cuts).items()}
        for indices, run in zip(cuts, carrying.runs, strict=True):
            if run.tokens:
                yield count_part(run, trees[indices], 1 + FORWARD if carrying.scored else 1)
            else:
                yield report(0, 0, 0, 0, passes=FORWARD) if run.forward_only else count(indices)

    return tuple(tuple(count_rank(*one)) for one in enumerate(plan.micro_batches))


def rank_cost(rank: Sequence[MicroBatchReport], bubble: float) -> float:
    """Return the cost of a rank's micro-batches, and of a pipeline's bubble, see :func:`plan_step`."""
    costs = [batch.cost for batch in rank]
    return sum(costs) + bubble * max(costs)


def report_plan(
    samples: Sequence[Sample],
    plan: ForestPlan,
    cost_model: CostModel,
    *,
    max_tokens: int | None = None,
    padding: Padding = NO_PADDING,
    bubble: float = 0.0,
    sharing: Sharing = SHARE_ALL,
) -> PlanReport:
    """Count a plan of samples, from :func:`plan_step` or another planner; the lower bound respects ``max_tokens``."""
    order, shared = sort_samples(samples, sharing)
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))[order]
    scored = first_scored(samples, order, shared)
    everything = Leaves.every_sample(shared, lengths, scored)
    ranks = count_plan(everything, order, plan, cost_model, padding)
    costs = [rank_cost(rank, bubble) for rank in ranks]
    least = least_makespan(
        trie_from_order(np.arange(len(samples)), shared, lengths),
        cost_model,
        dp_size=len(ranks),
        micro_batches=plan.num_micro_batches,
        max_tokens=max_tokens if plan.carrying is None else None,
        scored=scored,
    )
    return PlanReport(
        ranks=ranks,
        logical_tokens=int(lengths.sum()),
        unique_tokens=everything.tokens,
        repeated_tokens=sum(map(sum, plan.physical_tokens)) - everything.tokens,
        padding=sum(batch.padding for rank in ranks for batch in rank),
        slowest=max(costs),
        mean=sum(costs) / len(costs),
        # The largest micro-batch costs no less than the average one.
        lower_bound=least * cost_model.token / UNITS_PER_TOKEN * (1 + bubble / plan.num_micro_batches),
        bubble=bubble,
        carried_tokens=plan.carried_tokens,
        scored_first_tokens=plan.scored_tokens,
    )


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
