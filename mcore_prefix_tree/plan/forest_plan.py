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
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.balance import balance
from mcore_prefix_tree.plan.carry import (
    WHOLE,
    CarriedMicroBatch,
    CarriedTree,
    Carrying,
    carried_trees,
    in_step,
    scored_places,
    with_first_pass,
)
from mcore_prefix_tree.plan.cost import CostModel, words_of_states
from mcore_prefix_tree.plan.cuts import Run, fewest_runs, least_repeating_runs, smallest_budget
from mcore_prefix_tree.plan.pack import Leaves, deal, first_scored
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, sort_samples
from mcore_prefix_tree.utils.choices import OverBudget

Int64Array = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Clusters:
    """Clusters in the order of their first samples, to be cut into runs like samples.

    The cost of a run of clusters by ``context`` and ``fresh`` is never less than what it takes of the budget: for two
    neighbours it counts only the common tokens of their first samples once.

    Attributes:
        members: places of each cluster's samples in the depth-first order, increasing.
        context: int64 ``[C]``, tokens of the budget that each cluster's first sample saves next to the previous one's.
        fresh: int64 ``[C]``, what the cluster adds.
    """

    members: list[Int64Array]
    context: Int64Array
    fresh: Int64Array

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
    """A sample, or a set of samples that stay together, is longer than a micro-batch may be."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForestPlan:
    """Samples that each micro-batch of a step holds.

    Attributes:
        micro_batches: indices of the samples of each micro-batch, by data-parallel rank, then by micro-batch; an empty
            tuple is a micro-batch of padding. All ranks have the same number.
        physical_tokens: unique tokens of each micro-batch, before padding; counts an ancestor once per micro-batch that
            computes it, and 0 for a micro-batch of the first pass over carried tokens.
        carrying: each rank's parts of trees above the budget; the micro-batch of a part names all samples of its tree.
            None without any.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    physical_tokens: tuple[tuple[int, ...], ...]
    carrying: tuple[Carrying, ...] | None = None

    def carrying_of(self, rank: int) -> Carrying | None:
        return None if self.carrying is None else self.carrying[rank]

    @property
    def carried_tokens(self) -> int:
        """Tokens that the first passes of all ranks compute in addition, forward only."""
        return sum(rank.carried_tokens for rank in self.carrying or ())

    @property
    def scored_tokens(self) -> int:
        """Tokens that the scoring passes of all ranks compute in addition, forward only."""
        return sum(rank.scored_tokens for rank in self.carrying or ())

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])

    @property
    def idle_ranks(self) -> int:
        """Data-parallel ranks without any sample."""
        return sum(not any(rank) for rank in self.micro_batches)


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
        over_budget: way to cut a tree above ``max_tokens``. With ``auto`` a tree is not carried where only that keeps
            to ``micro_batches``.
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
    step = _Step(samples, max_tokens, dp_size, micro_batch_multiple, cost_model, sharing, together)
    for full in (False, True) if over_budget != "repeat" else ():  # full chunks are fewer, and carry more
        trees = step.cut_trees(over_budget, full=full, scores_first=scores_first)
        try:
            if trees:
                return step.plan_carrying(trees, micro_batches, scores_first=scores_first, trains=trains)
        except BudgetError:
            if full and any(tree.has_to for tree in trees):
                raise
    return step.plan_repeating(micro_batches, bubble)


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
    step = _Step(samples, max_tokens, dp_size, micro_batch_multiple, cost_model, sharing, together)
    if over_budget == "repeat":
        return step.count_repeating()
    trees = step.cut_trees(over_budget, full=True, scores_first=scores_first)
    if not trees:
        return step.count_repeating()
    carrying = step.round_up(len(step.deal_trees(trees)[0]))
    return carrying if any(tree.has_to for tree in trees) else min(carrying, step.count_repeating())


@dataclass(eq=False)
class _Step:
    """Samples of a step, and the budget of its micro-batches; for the fields see :func:`plan_step`.

    Attributes:
        order: int64 ``[S]``, indices of the samples in depth-first order.
        shared, lengths: int64 ``[S]``, tokens that each in that order shares with the one before, and its length.
    """

    samples: Sequence[Sample]
    max_tokens: int
    dp_size: int
    multiple: int
    cost_model: CostModel | None
    sharing: Sharing
    together: Sequence[Hashable] | None

    def __post_init__(self) -> None:
        self.order, self.shared = sort_samples(self.samples, self.sharing)
        lengths = np.fromiter(map(len, self.samples), dtype=np.int64, count=len(self.samples))
        self.lengths: Int64Array = lengths[self.order]

    @cached_property
    def keys(self) -> list[Hashable] | None:
        """``together`` in depth-first order."""
        return None if self.together is None else [self.together[index] for index in self.order.tolist()]

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
            raise BudgetError(
                f"{asked} micro-batches on each of {self.dp_size} ranks cannot hold these samples with "
                f"batch.max_tokens={self.max_tokens}{words_of_states(self.cost_model)}; {fewest} can"
            )
        return fewest if asked is None else asked

    def cut_trees(self, over_budget: OverBudget, *, full: bool, scores_first: bool) -> list[CarriedTree]:
        """Return the trees that are carried."""
        return carried_trees(
            *(self.order, self.shared, self.lengths, self.max_tokens, self.dp_size, self.cost_model, over_budget),
            together=self.keys,
            scores_first=scores_first,
            full=full,
        )

    def deal_trees(self, trees: Sequence[CarriedTree], *, trains: bool = True) -> list[list[CarriedMicroBatch]]:
        """Deal trees in chunks to the ranks by their cost; the other samples as without them."""
        rest = sorted(set(range(len(self.samples))).difference(*(tree.samples for tree in trees)))
        others = plan_step(
            [self.samples[index] for index in rest],
            max_tokens=self.max_tokens,
            dp_size=self.dp_size,
            cost_model=self.cost_model,
            sharing=self.sharing,
            together=[self.together[index] for index in rest] if self.together is not None and rest else None,
        )
        dealt = deal([tree.units for tree in trees], self.dp_size, size=[1] * len(trees), room=len(trees)).ranks
        # The most other tokens to the rank with the fewest chunks.
        dealt.sort(key=lambda own: -sum(len(trees[number].chunks) for number in own))
        by_tokens = sorted(range(self.dp_size), key=lambda rank: sum(others.physical_tokens[rank]))
        rows: list[list[CarriedMicroBatch]] = []
        for own, other in zip(dealt, by_tokens, strict=True):
            row: list[CarriedMicroBatch] = []
            for tree in (trees[number] for number in own):
                parts = with_first_pass(tree.chunks, self.max_tokens) if trains else tree.chunks
                row += [(tree.samples, part.tokens * part.is_chunk, part) for part in parts]
            whole = zip(others.micro_batches[other], others.physical_tokens[other], strict=True)
            row += [(tuple(rest[index] for index in cut), tokens, WHOLE) for cut, tokens in whole if cut]
            rows.append(row)
        return in_step(rows)

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
        for sample in self.samples:
            if len(sample) > self.max_tokens:
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
            return self._plan_clusters(self.clusters, per_rank)
        if self.cost_model is None:
            return self._plan_evenly(per_rank)
        leaves, cost_model = Leaves.of_samples(self.shared, self.lengths, self.scored), self.cost_model
        limits = {"dp_size": self.dp_size, "micro_batches": per_rank, "max_tokens": self.max_tokens}
        ranks = balance(leaves, cost_model, **limits, bubble=bubble)
        ranks = [_for_pipeline(rank, lambda chosen: leaves.some(chosen).units(cost_model)) for rank in ranks]
        order = [self.order[start:end].tolist() for start, end in zip(leaves.start, leaves.end, strict=True)]
        return _make_plan(
            [
                [
                    (tuple(index for leaf in chosen for index in order[leaf]), leaves.some(chosen).tokens)
                    for chosen in rank
                ]
                for rank in ranks
            ]
        )

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

    def _plan_clusters(self, clusters: Clusters, per_rank: int) -> ForestPlan:
        """Plan micro-batches that keep clusters together."""
        count = self.dp_size * per_rank
        budget = smallest_budget(clusters.context, clusters.fresh, count, self.max_tokens)
        bins = [clusters.places(run) for run in fewest_runs(clusters.context, clusters.fresh, budget)]
        bins += [np.empty(0, dtype=np.int64)] * (count - len(bins))
        own = [self.leaves.some(places) for places in bins]
        cost = [leaves.tokens if self.cost_model is None else leaves.units(self.cost_model) for leaves in own]
        ranks = deal(cost, self.dp_size, size=[1] * count, room=per_rank).ranks
        if self.cost_model is not None:
            ranks = [_for_pipeline(rank, cost.__getitem__) for rank in ranks]
        return _make_plan([[(tuple(self.order[bins[at]].tolist()), own[at].tokens) for at in rank] for rank in ranks])


def _make_plan(
    ranks: Sequence[Sequence[tuple[tuple[int, ...], int]]], carrying: tuple[Carrying, ...] | None = None
) -> ForestPlan:
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
