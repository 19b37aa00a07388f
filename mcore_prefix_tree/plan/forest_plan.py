"""Cut a step's samples into micro-batches under a token budget and deal them to data-parallel ranks.

In depth-first order the samples of a subtree are neighbours, so micro-batches are made of runs of that order. If a cut
divides a tree, both sides compute the shared ancestors; every sample still belongs to exactly one micro-batch, so the
step's gradient does not depend on the cuts. Or a tree is cut anywhere, into chunks that read each other's keys and
values (:mod:`mcore_prefix_tree.plan.carry`). The plan is a function of the samples' content: every rank computes the
same one.

Legend: S samples, D data-parallel ranks, K micro-batches per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.balance import balance, balance_around
from mcore_prefix_tree.plan.carry import (
    WHOLE,
    CarriedMicroBatch,
    CarriedTree,
    Carrying,
    ForestPlan,
    carried_trees,
    in_step,
    scored_places,
    with_first_pass,
)
from mcore_prefix_tree.plan.cost import CostModel, words_of_states
from mcore_prefix_tree.plan.cuts import Run, fewest_runs, least_repeating_runs, smallest_budget
from mcore_prefix_tree.plan.pack import Leaves, deal, first_scored
from mcore_prefix_tree.plan.plan_report import count_plan, rank_cost
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, sort_samples
from mcore_prefix_tree.utils.choices import OverBudget

Int64Array = npt.NDArray[np.int64]
T = TypeVar("T")
MicroBatch: TypeAlias = "tuple[tuple[int, ...], int]"  # indices of its samples, and its tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Clusters:
    """Clusters in the order of their first samples, to be cut into runs like samples.

    The cost of a run of clusters by ``context`` and ``fresh`` is never less than what it takes of the budget: for two
    neighbours it counts only the common tokens of their first samples once.
    """

    members: list[Int64Array]  # places of each cluster's samples in the depth-first order, increasing
    # int64 [C], tokens of the budget that each cluster's first sample saves next to the previous one's.
    context: Int64Array
    fresh: Int64Array  # int64 [C], what the cluster adds

    @classmethod
    def of(cls, keys: Sequence[Hashable], leaves: Leaves, cost_model: CostModel | None) -> Clusters:
        """Put the samples together that have the same key; None leaves a sample free. Both are in depth-first order."""
        members: dict[Hashable, list[int]] = {}
        for place, key in enumerate(keys):
            members.setdefault(("free", place) if key is None else ("kept", key), []).append(place)
        arrays = [np.array(places, dtype=np.int64) for places in members.values()]
        first = np.array([places[0] for places in arrays], dtype=np.int64)
        # Two samples have as many tokens in common as the least similar neighbours between them.
        context = leaves.some(first).saved_tokens(cost_model)
        tokens = np.array([leaves.some(places).room(cost_model) for places in arrays], dtype=np.int64)
        return cls(members=arrays, context=context, fresh=tokens - context)

    @property
    def tokens(self) -> Int64Array:
        """int64 ``[C]``, tokens of the budget that each takes by itself."""
        return self.context + self.fresh

    def places(self, run: Run) -> Int64Array:
        """The samples of a run of clusters, in depth-first order."""
        return np.sort(np.concatenate(self.members[slice(*run)]))


class BudgetError(SampleError):
    """A sample, or a set of samples that stay together, is longer than a micro-batch may be.

    Attributes:
        fewest: number of micro-batches per rank that can hold the samples, where fewer are asked for.
    """

    fewest = 0


def plan_step(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    dp_size: int = 1,
    micro_batch_multiple: int = 1,
    micro_batches: int | None = None,
    cost_model: CostModel | None = None,
    bubble: float = 0.0,
    sharing: Sharing = SHARE_ALL,
    together: Sequence[Hashable] | None = None,
    over_budget: OverBudget = "repeat",
    scores_first: bool = False,
    trains: bool = True,
) -> ForestPlan:
    """Plan one step, in as few micro-batches per rank as the budget allows.

    With a cost model, look for the plan whose slowest rank costs least; a rank's cheap micro-batches come first and
    last, which fill and drain a pipeline. Without one, make the largest micro-batch as small as it can be, repeat as
    few tokens as that allows, and deal the largest first, back and forth over the ranks.

    Args:
        samples: samples of the step, all ranks together.
        max_tokens: largest number of physical tokens of a micro-batch, before padding. The cost model's
            ``state_tokens`` are counted in addition.
        dp_size: D.
        micro_batch_multiple: number that K is a multiple of (the pipeline size, if stages are interleaved).
        micro_batches: K, such a multiple; None chooses it.
        cost_model: cost model that compares the ranks' work; None counts tokens of micro-batches.
        bubble: cost that a pipeline adds to a rank, in times that of its largest micro-batch: the stages but one, over
            the virtual stages of each (Narayanan et al., SC 2021, section 2.2). Without a cost model it is unused.
        sharing: common prefixes that samples share; fold the micro-batches with the same.
        together: key of each sample; samples with the same key share a micro-batch, or are in trees that are carried
            together; None leaves a sample free. The micro-batches are then runs of neighbours as even in tokens as can
            be found, and a cost model only decides their distribution over the ranks.
        over_budget: way to cut a tree above ``max_tokens``. ``auto`` takes the cheapest plan that keeps to
            ``micro_batches``; it never costs more than those of ``repeat`` and ``carry``.
        scores_first: whether the loss of a carried tree needs the scores of all its tokens before the step.
        trains: whether the step runs backward: see :class:`~mcore_prefix_tree.plan.carry.Carrying`.

    Raises:
        BudgetError: a sample, or samples that stay together, have more than ``max_tokens`` unique tokens, or
            ``micro_batches`` are too few.
        ValueError: ``micro_batches`` is not a multiple of ``micro_batch_multiple``.
    """
    if micro_batches is not None and (micro_batches < 1 or micro_batches % micro_batch_multiple):
        raise ValueError(
            f"micro_batches={micro_batches} must be a positive multiple of micro_batch_multiple={micro_batch_multiple}"
        )
    step = _Step.of(samples, max_tokens, dp_size, micro_batch_multiple, cost_model, sharing, together)
    found: list[ForestPlan | BudgetError] = []
    for full in (False, True):  # full chunks are fewer, and carry more
        found += [
            step.plan(trees, micro_batches, bubble, scores_first=scores_first, trains=trains)
            for trees in step.choices(over_budget, full=full, scores_first=scores_first)
            if trees or not full
        ]
        if all(isinstance(one, ForestPlan) for one in found):
            break
    plans = [one for one in found if isinstance(one, ForestPlan)]
    if not plans:
        raise min((one for one in found if isinstance(one, BudgetError)), key=lambda error: error.fewest)
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: step.cost_of(plan, bubble))


def fewest_micro_batches(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    dp_size: int = 1,
    micro_batch_multiple: int = 1,
    cost_model: CostModel | None = None,
    sharing: Sharing = SHARE_ALL,
    together: Sequence[Hashable] | None = None,
    over_budget: OverBudget = "repeat",
    scores_first: bool = False,
) -> int:
    """Return the least K that :func:`plan_step` can keep to in training; arguments and errors as there."""
    step = _Step.of(samples, max_tokens, dp_size, micro_batch_multiple, cost_model, sharing, together)
    return min(
        step.round_up(len(step.deal_trees(trees)[0])) if trees else step.count_repeating()
        for trees in step.choices(over_budget, full=True, scores_first=scores_first)
    )


@dataclass(kw_only=True, eq=False)
class _Step:
    """Samples of a step, or some of their trees, and the budget of micro-batches; for others see :func:`plan_step`."""

    samples: Sequence[Sample]
    max_tokens: int
    dp_size: int
    multiple: int
    cost_model: CostModel | None
    order: Int64Array  # int64 [S], indices of the samples in depth-first order
    # shared, lengths: int64 [S], tokens that each in that order shares with the one before, and its length.
    shared: Int64Array
    lengths: Int64Array
    keys: list[Hashable] | None  # together in that order

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        max_tokens: int,
        dp_size: int,
        multiple: int,
        cost_model: CostModel | None,
        sharing: Sharing,
        together: Sequence[Hashable] | None,
    ) -> _Step:
        """Return a step of all samples."""
        order, shared = sort_samples(samples, sharing)
        return cls(
            samples=samples,
            max_tokens=max_tokens,
            dp_size=dp_size,
            multiple=multiple,
            cost_model=cost_model,
            order=order,
            shared=shared,
            lengths=np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))[order],
            keys=None if together is None else [together[index] for index in order.tolist()],
        )

    def without(self, trees: Sequence[CarriedTree]) -> _Step:
        """Return the step without some of its trees."""
        is_left = ~np.isin(self.order, [index for tree in trees for index in tree.samples])
        left = np.flatnonzero(is_left)
        keys = self.keys and [self.keys[place] for place in left.tolist()]
        return replace(self, order=self.order[left], shared=self.shared[left], lengths=self.lengths[left], keys=keys)

    @property
    def costs(self) -> CostModel:
        """The cost model that compares ways to cut trees; tokens without one."""
        return self.cost_model or CostModel()

    @cached_property
    def scored(self) -> Int64Array | None:
        """int64 ``[S]``, cost that scoring adds per sample, or None if it is 0."""
        costs = self.cost_model is not None and self.cost_model.scored
        return first_scored(self.samples, self.order, self.shared) if costs else None

    @cached_property
    def leaves(self) -> Leaves:
        """The samples, each a leaf."""
        return Leaves.every_sample(self.shared, self.lengths, self.scored)

    def round_up(self, micro_batches: int) -> int:
        return max(1, -(-micro_batches // self.multiple)) * self.multiple

    def choose_count(self, asked: int | None, fewest: int) -> int:
        """Return K; raise BudgetError if fewer than possible are asked for."""
        if asked is not None and asked < fewest:
            error = BudgetError(
                f"{asked} micro-batches on each of {self.dp_size} ranks cannot hold these samples with "
                f"batch.max_tokens={self.max_tokens}{words_of_states(self.cost_model)}; {fewest} can"
            )
            error.fewest = fewest
            raise error
        return fewest if asked is None else asked

    def choices(self, over_budget: OverBudget, *, full: bool, scores_first: bool) -> list[list[CarriedTree]]:
        """Return the sets of trees that may be carried; with ``auto`` the first one has no tree that can be cut."""
        if over_budget == "repeat":
            return [[]]
        trees = carried_trees(
            *(self.order, self.leaves, self.max_tokens, self.costs),
            together=self.keys,
            scores_first=scores_first,
            full=full,
        )
        if over_budget == "carry":
            return [trees]
        # Samples can be on all ranks, chunks of a tree on one.
        share = int((self.costs.units_of_path(self.lengths) - self.costs.units_of_path(self.shared)).sum())
        sets = [
            [tree for tree in trees if tree.has_to],
            [tree for tree in trees if tree.has_to or (tree.saves and tree.units * self.dp_size <= share)],
            [tree for tree in trees if tree.saves],
            trees,
        ]
        return [own for at, own in enumerate(sets) if own not in sets[:at]]

    def cost_of(self, plan: ForestPlan, bubble: float) -> float:
        """Return the cost of a plan's slowest rank."""
        ranks = count_plan(self.leaves, self.order, plan, self.costs)
        return max(rank_cost(rank, bubble) for rank in ranks)

    def deal_trees(self, trees: Sequence[CarriedTree], *, trains: bool = True) -> list[list[CarriedMicroBatch]]:
        """Deal trees in chunks to the ranks by their cost, and the other samples around them."""
        units = [tree.units for tree in trees]
        dealt = deal(units, self.dp_size, size=[1] * len(trees), room=len(trees)).ranks
        load = np.array([sum(units[number] for number in own) for own in dealt])
        rows: list[list[CarriedMicroBatch]] = []
        for own, others in zip(dealt, self.without(trees).plan_around(load), strict=True):
            row: list[CarriedMicroBatch] = []
            for tree in (trees[number] for number in own):
                parts = with_first_pass(tree.chunks, self.max_tokens) if trains else tree.chunks
                row += [(tree.samples, part.tokens * part.is_chunk, part) for part in parts]
            rows.append(row + [(*one, WHOLE) for one in others])
        return in_step(rows)

    def plan_around(self, load: Int64Array) -> list[list[MicroBatch]]:
        """Plan each rank's micro-batches of whole samples; ranks have ``load``, int64 ``[D]`` units, already."""
        if self.clusters is not None:
            return self._deal_clusters(self.clusters, self.count_repeating(), load)
        leaves = Leaves.of_samples(self.shared, self.lengths, self.scored)
        ranks = balance_around(leaves, self.costs, load, max_tokens=self.max_tokens)
        return self._list_samples(leaves, ranks)

    def plan(
        self,
        trees: Sequence[CarriedTree],
        micro_batches: int | None,
        bubble: float,
        *,
        scores_first: bool,
        trains: bool,
    ) -> ForestPlan | BudgetError:
        """Return a plan that carries some trees, or the error that none keeps to the budget."""
        try:
            if not trees:
                return self.plan_repeating(micro_batches, bubble)
            return self.plan_carrying(trees, micro_batches, scores_first=scores_first, trains=trains)
        except BudgetError as error:
            return error

    def plan_carrying(
        self, trees: Sequence[CarriedTree], micro_batches: int | None, *, scores_first: bool, trains: bool
    ) -> ForestPlan:
        """Plan a step with trees in chunks; raises BudgetError if ``micro_batches`` are too few."""
        rows = self.deal_trees(trees, trains=trains)
        per_rank = self.choose_count(micro_batches, self.round_up(len(rows[0])))
        rows = [row + [((), 0, WHOLE)] * (per_rank - len(row)) for row in rows]
        scored = scored_places(rows, self.multiple, trains=trains) if scores_first else ()
        return _make_plan(
            [[(own, tokens) for own, tokens, _ in row] for row in rows],
            tuple(Carrying(runs=tuple(part for *_, part in row), trains=trains, scored=scored) for row in rows),
        )

    @cached_property
    def clusters(self) -> Clusters | None:
        """The samples that stay together, None without any; raises BudgetError for a cluster above the budget."""
        if self.keys is None:
            return None
        clusters = Clusters.of(self.keys, self.leaves, self.cost_model)
        for members, tokens in zip(clusters.members, clusters.tokens.tolist(), strict=True):
            if tokens > self.max_tokens:
                sources = [self.samples[index].source for index in self.order[members].tolist()]
                raise BudgetError(
                    f"{', '.join(sources[:-1])} and {sources[-1]} stay together, and their {tokens} unique tokens do "
                    f"not fit a micro-batch of batch.max_tokens={self.max_tokens}{words_of_states(self.cost_model)}; "
                    "raise batch.max_tokens or shorten the samples"
                )
        return clusters

    def count_repeating(self) -> int:
        """Return the least K if ancestors are repeated; raises BudgetError for a sample above the budget."""
        if (too_long := self.order[self.lengths > self.max_tokens]).size:
            sample = self.samples[too_long.min()]
            raise BudgetError(
                f"{sample.source}: {len(sample)} tokens do not fit a micro-batch of "
                f"batch.max_tokens={self.max_tokens}; raise batch.max_tokens or shorten the sample"
            )
        if self.clusters is not None:
            saved, fresh = self.clusters.context, self.clusters.fresh
        else:
            saved = self.leaves.saved_tokens(self.cost_model)
            fresh = self.lengths - saved
        return self.round_up(-(-len(fewest_runs(saved, fresh, self.max_tokens)) // self.dp_size))

    def plan_repeating(self, micro_batches: int | None, bubble: float) -> ForestPlan:
        """Plan a step whose micro-batches hold whole samples and repeat ancestors; errors as :func:`plan_step`."""
        per_rank = self.choose_count(micro_batches, self.count_repeating())
        if self.clusters is not None:
            return _make_plan(self._deal_clusters(self.clusters, per_rank))
        if self.cost_model is None:
            return self._plan_evenly(per_rank)
        leaves, cost_model = Leaves.of_samples(self.shared, self.lengths, self.scored), self.cost_model
        limits = {"dp_size": self.dp_size, "micro_batches": per_rank, "max_tokens": self.max_tokens}
        ranks = balance(leaves, cost_model, **limits, bubble=bubble)
        ranks = [_for_pipeline(rank, lambda chosen: leaves.some(chosen).units(cost_model)) for rank in ranks]
        return _make_plan(self._list_samples(leaves, ranks))

    def _list_samples(self, leaves: Leaves, ranks: Sequence[Sequence[Int64Array]]) -> list[list[MicroBatch]]:
        """Return the samples and tokens of micro-batches of leaves, int64 ``[n]`` each."""
        order = [self.order[start:end].tolist() for start, end in zip(leaves.start, leaves.end, strict=True)]
        return [
            [(tuple(index for leaf in chosen for index in order[leaf]), leaves.some(chosen).tokens) for chosen in rank]
            for rank in ranks
        ]

    def _plan_evenly(self, per_rank: int) -> ForestPlan:
        """Plan micro-batches as even in tokens as possible."""
        count, shared, fresh = self.dp_size * per_rank, self.shared, self.lengths - self.shared
        budget = smallest_budget(shared, fresh, count, self.max_tokens)
        cuts = least_repeating_runs(shared, fresh, budget)
        if len(cuts) > count:
            cuts = fewest_runs(shared, fresh, budget)
        runs = [
            (tuple(self.order[start:end].tolist()), int(shared[start] + fresh[start:end].sum())) for start, end in cuts
        ]
        runs += [((), 0)] * (count - len(runs))
        # Largest first, back and forth over the ranks: each rank gets as many, and about as much.
        runs.sort(key=lambda run: -run[1])
        turns = [runs[start : start + self.dp_size] for start in range(0, count, self.dp_size)]
        turns[1::2] = [turn[::-1] for turn in turns[1::2]]
        return _make_plan(list(zip(*turns, strict=True)))

    def _deal_clusters(
        self, clusters: Clusters, per_rank: int, load: Int64Array | None = None
    ) -> list[list[MicroBatch]]:
        """Return micro-batches that keep clusters together, ``per_rank`` each; as many as it takes around a load."""
        count = self.dp_size * per_rank
        budget = smallest_budget(clusters.context, clusters.fresh, count, self.max_tokens)
        bins = [clusters.places(run) for run in fewest_runs(clusters.context, clusters.fresh, budget)]
        if load is None:
            bins += [np.empty(0, dtype=np.int64)] * (count - len(bins))
        own = [self.leaves.some(places) for places in bins]
        cost = [
            leaves.tokens if self.cost_model is None and load is None else leaves.units(self.costs) for leaves in own
        ]
        room = per_rank if load is None else len(bins)
        loads = None if load is None else load.tolist()
        ranks = deal(cost, self.dp_size, size=[1] * len(bins), room=room, load=loads).ranks
        if self.cost_model is not None:
            ranks = [_for_pipeline(rank, cost.__getitem__) for rank in ranks]
        return [[(tuple(self.order[bins[at]].tolist()), own[at].tokens) for at in rank] for rank in ranks]


def _make_plan(ranks: Sequence[Sequence[MicroBatch]], carrying: tuple[Carrying, ...] | None = None) -> ForestPlan:
    """Return the plan of each rank's micro-batches, their samples and tokens."""
    return ForestPlan(
        micro_batches=tuple(tuple(own for own, _ in rank) for rank in ranks),
        physical_tokens=tuple(tuple(tokens for _, tokens in rank) for rank in ranks),
        carrying=carrying,
    )


def _for_pipeline(rank: list[T], cost: Callable[[T], int]) -> list[T]:
    """The cheapest micro-batches first and last: while a pipeline fills and drains, all stages wait for those."""
    by_cost = sorted(rank, key=cost)
    return by_cost[0::2] + by_cost[1::2][::-1]
