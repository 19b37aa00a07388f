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
from functools import partial
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
    attends_stacks: bool = True,
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
        attends_stacks: whether the attention of a carried tree computes more than is read; ``auto`` counts that.
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
    order, shared, lengths = _in_order(samples, sharing)
    keys = None if together is None else [together[index] for index in order.tolist()]
    if over_budget != "repeat":
        carrying = partial(
            _carry_plan,
            samples,
            micro_batches=micro_batches,
            max_tokens=max_tokens,
            dp_size=dp_size,
            micro_batch_multiple=micro_batch_multiple,
            cost_model=cost_model,
            sharing=sharing,
            together=together,
            scores_first=scores_first,
            trains=trains,
        )
        cut = partial(
            carried_trees,
            *(order, shared, lengths, max_tokens, dp_size, cost_model, over_budget, attends_stacks),
            together=keys,
            scores_first=scores_first,
        )
        for full in (False, True):  # full chunks are fewer, and carry more
            trees = cut(full=full)
            try:
                if trees:
                    return carrying(trees)
            except BudgetError:
                if full and any(tree.has_to for tree in trees):
                    raise
    _check_fits(samples, max_tokens)
    if keys is not None:
        leaves = Leaves.every_sample(shared, lengths, _scored(samples, order, shared, cost_model))
        clusters = _make_clusters(keys, leaves, samples, order, max_tokens, cost_model)
        fewest = _fewest_per_rank(clusters.context, clusters.fresh, max_tokens, dp_size, micro_batch_multiple)
        per_rank = _micro_batches_per_rank(micro_batches, fewest, max_tokens, dp_size, cost_model)
        return _cluster_plan(clusters, leaves, order, max_tokens, dp_size, per_rank, cost_model)
    saved = Leaves.every_sample(shared, lengths).saved_tokens(cost_model)
    fewest = _fewest_per_rank(saved, lengths - saved, max_tokens, dp_size, micro_batch_multiple)
    per_rank = _micro_batches_per_rank(micro_batches, fewest, max_tokens, dp_size, cost_model)
    if cost_model is None:
        return _even_plan(order, shared, lengths - shared, max_tokens, dp_size, per_rank)

    leaves = Leaves.of_samples(shared, lengths, _scored(samples, order, shared, cost_model))
    ranks = balance(leaves, cost_model, dp_size=dp_size, micro_batches=per_rank, max_tokens=max_tokens, bubble=bubble)
    ranks = [_for_pipeline(rank, lambda chosen: leaves.some(chosen).units(cost_model)) for rank in ranks]
    return ForestPlan(
        micro_batches=tuple(
            tuple(
                tuple(index for leaf in chosen for index in order[leaves.start[leaf] : leaves.end[leaf]].tolist())
                for chosen in rank
            )
            for rank in ranks
        ),
        physical_tokens=tuple(tuple(leaves.some(chosen).tokens for chosen in rank) for rank in ranks),
    )


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
    attends_stacks: bool = True,
    scores_first: bool = False,
) -> int:
    """Return the least K that :func:`plan_step` can keep to in training; arguments and errors as there."""
    order, shared, lengths = _in_order(samples, sharing)
    keys = None if together is None else [together[index] for index in order.tolist()]
    carried: int | None = None
    if over_budget != "repeat":
        trees = carried_trees(
            *(order, shared, lengths, max_tokens, dp_size, cost_model, over_budget, attends_stacks),
            together=keys,
            scores_first=scores_first,
            full=True,
        )
        if trees:
            plan = _carry_plan(
                samples,
                trees,
                max_tokens=max_tokens,
                dp_size=dp_size,
                micro_batch_multiple=micro_batch_multiple,
                cost_model=cost_model,
                sharing=sharing,
                together=together,
            )
            carried = plan.num_micro_batches
            if any(tree.has_to for tree in trees):
                return carried
    _check_fits(samples, max_tokens)
    if keys is None:
        saved = Leaves.every_sample(shared, lengths).saved_tokens(cost_model)
        repeated = _fewest_per_rank(saved, lengths - saved, max_tokens, dp_size, micro_batch_multiple)
        return repeated if carried is None else min(carried, repeated)
    clusters = _make_clusters(keys, Leaves.every_sample(shared, lengths), samples, order, max_tokens, cost_model)
    fewest = _fewest_per_rank(clusters.context, clusters.fresh, max_tokens, dp_size, micro_batch_multiple)
    return fewest if carried is None else min(carried, fewest)


def _carry_plan(
    samples: Sequence[Sample],
    trees: Sequence[CarriedTree],
    *,
    max_tokens: int,
    dp_size: int,
    micro_batch_multiple: int,
    cost_model: CostModel | None,
    sharing: Sharing,
    together: Sequence[Hashable] | None,
    micro_batches: int | None = None,
    scores_first: bool = False,
    trains: bool = True,
) -> ForestPlan:
    """Plan a step with trees in chunks: the dearest tree to the lightest rank; the other samples as without them."""
    carried = {index for tree in trees for index in tree.samples}
    rest = [index for index in range(len(samples)) if index not in carried]
    ranks: list[list[CarriedTree]] = [[] for _ in range(dp_size)]
    for tree in sorted(trees, key=lambda tree: -tree.units):
        min(ranks, key=lambda rank: sum(one.units for one in rank)).append(tree)
    others = plan_step(
        [samples[index] for index in rest],
        max_tokens=max_tokens,
        dp_size=dp_size,
        cost_model=cost_model,
        sharing=sharing,
        together=[together[index] for index in rest] if together is not None and rest else None,
    )
    # The most other tokens to the rank with the fewest chunks.
    by_tokens = sorted(range(dp_size), key=lambda rank: -sum(others.physical_tokens[rank]))
    by_chunks = sorted(range(dp_size), key=lambda rank: sum(len(tree.chunks) for tree in ranks[rank]))
    rows: list[list[CarriedMicroBatch]] = [[] for _ in range(dp_size)]
    for rank, other in zip(by_chunks, by_tokens, strict=True):
        for tree in ranks[rank]:
            runs = with_first_pass(tree.chunks, max_tokens) if trains else iter(tree.chunks)
            rows[rank] += [(tree.samples, run.tokens * run.is_chunk, run) for run in runs]
        whole = zip(others.micro_batches[other], others.physical_tokens[other], strict=True)
        rows[rank] += [(tuple(rest[index] for index in own), tokens, WHOLE) for own, tokens in whole if own]
    rows = in_step(rows)
    fewest = max(1, -(-len(rows[0]) // micro_batch_multiple)) * micro_batch_multiple
    per_rank = _micro_batches_per_rank(micro_batches, fewest, max_tokens, dp_size, cost_model)
    rows = [row + [((), 0, WHOLE)] * (per_rank - len(row)) for row in rows]
    scored = scored_places(rows, micro_batch_multiple, trains=trains) if scores_first else ()
    return ForestPlan(
        micro_batches=tuple(tuple(own for own, _, _ in row) for row in rows),
        physical_tokens=tuple(tuple(tokens for _, tokens, _ in row) for row in rows),
        carrying=tuple(Carrying(runs=tuple(run for _, _, run in row), trains=trains, scored=scored) for row in rows),
    )


def _in_order(samples: Sequence[Sample], sharing: Sharing) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the samples' depth-first order, and in it the tokens shared with the sample before, and the length."""
    order, shared = sort_samples(samples, sharing)
    return order, shared, np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))[order]


def _check_fits(samples: Sequence[Sample], max_tokens: int) -> None:
    """Raise BudgetError for a sample above ``max_tokens``."""
    for sample in samples:
        if len(sample) > max_tokens:
            raise BudgetError(
                f"{sample.source}: {len(sample)} tokens do not fit a micro-batch of batch.max_tokens={max_tokens}; "
                "raise batch.max_tokens or shorten the sample"
            )


def _scored(
    samples: Sequence[Sample], order: Int64Array, shared: Int64Array, cost_model: CostModel | None
) -> Int64Array | None:
    """Return the cost that scoring adds per sample, int64 ``[S]`` as the arguments, or None if it is 0."""
    return first_scored(samples, order, shared) if cost_model is not None and cost_model.scored else None


def _fewest_per_rank(shared: Int64Array, fresh: Int64Array, max_tokens: int, dp_size: int, multiple: int) -> int:
    """Return the fewest micro-batches per rank, a multiple of ``multiple``; arrays are int64 ``[S]``."""
    needed = len(fewest_runs(shared, fresh, max_tokens))
    return max(1, -(-needed // (dp_size * multiple))) * multiple


def _micro_batches_per_rank(
    asked: int | None, fewest: int, max_tokens: int, dp_size: int, cost_model: CostModel | None
) -> int:
    if asked is not None and asked < fewest:
        raise BudgetError(
            f"{asked} micro-batches on each of {dp_size} ranks cannot hold these samples with "
            f"batch.max_tokens={max_tokens}{words_of_states(cost_model)}; {fewest} can"
        )
    return fewest if asked is None else asked


def _for_pipeline(rank: list[T], cost: Callable[[T], int]) -> list[T]:
    """The cheapest micro-batches first and last: while a pipeline fills and drains, all stages wait for those."""
    by_cost = sorted(rank, key=cost)
    return by_cost[0::2] + by_cost[1::2][::-1]


def _even_plan(
    order: Int64Array, shared: Int64Array, fresh: Int64Array, max_tokens: int, dp_size: int, per_rank: int
) -> ForestPlan:
    """Plan micro-batches as even in tokens as possible; arrays are int64 ``[S]``."""
    count = dp_size * per_rank
    budget = smallest_budget(shared, fresh, count, max_tokens)
    cuts = least_repeating_runs(shared, fresh, budget)
    if len(cuts) > count:
        cuts = fewest_runs(shared, fresh, budget)
    runs = [(int(shared[start] + fresh[start:end].sum()), tuple(order[start:end].tolist())) for start, end in cuts]
    runs += [(0, ())] * (count - len(runs))
    # Largest first, back and forth over the ranks: each rank gets as many, and about as much.
    runs.sort(key=lambda run: -run[0])
    dealt: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(dp_size)]
    for turn in range(per_rank):
        hand = runs[turn * dp_size : (turn + 1) * dp_size]
        for rank, run in enumerate(hand if turn % 2 == 0 else reversed(hand)):
            dealt[rank].append(run)
    return ForestPlan(
        micro_batches=tuple(tuple(run for _, run in rank) for rank in dealt),
        physical_tokens=tuple(tuple(tokens for tokens, _ in rank) for rank in dealt),
    )


def _make_clusters(
    keys: Sequence[Hashable],
    leaves: Leaves,
    samples: Sequence[Sample],
    order: Int64Array,
    max_tokens: int,
    cost_model: CostModel | None,
) -> Clusters:
    """Put leaves with one key together; raise BudgetError for a cluster above ``max_tokens``; ``order`` is ``[S]``."""
    clusters = Clusters.of(keys, leaves, cost_model)
    for members, tokens in zip(clusters.members, clusters.tokens.tolist(), strict=True):
        if tokens > max_tokens:
            sources = [samples[index].source for index in order[members].tolist()]
            raise BudgetError(
                f"{', '.join(sources[:-1])} and {sources[-1]} stay together, and their {tokens} unique tokens do not "
                f"fit a micro-batch of batch.max_tokens={max_tokens}{words_of_states(cost_model)}; raise "
                "batch.max_tokens or shorten the samples"
            )
    return clusters


def _cluster_plan(
    clusters: Clusters,
    leaves: Leaves,
    order: Int64Array,
    max_tokens: int,
    dp_size: int,
    per_rank: int,
    cost_model: CostModel | None,
) -> ForestPlan:
    """Plan micro-batches that keep clusters together; ``order`` is int64 ``[S]``."""
    count = dp_size * per_rank
    budget = smallest_budget(clusters.context, clusters.fresh, count, max_tokens)
    bins = [clusters.places(run) for run in fewest_runs(clusters.context, clusters.fresh, budget)]
    bins += [np.empty(0, dtype=np.int64)] * (count - len(bins))
    tokens = [leaves.some(places).tokens for places in bins]
    cost = tokens if cost_model is None else [leaves.some(places).units(cost_model) for places in bins]
    ranks = deal(cost, dp_size, size=[1] * count, room=per_rank).ranks
    if cost_model is not None:
        ranks = [_for_pipeline(rank, cost.__getitem__) for rank in ranks]
    return ForestPlan(
        micro_batches=tuple(tuple(tuple(order[bins[chosen]].tolist()) for chosen in rank) for rank in ranks),
        physical_tokens=tuple(tuple(tokens[chosen] for chosen in rank) for rank in ranks),
    )
