"""Assignment of leaves to micro-batches on ranks, to make the slowest rank as fast as possible.

Several constructions are tried and the best is kept; each ends early once it is within one per cent of a lower bound of
the slowest rank's cost over all assignments.

Legend: D data-parallel ranks, K micro-batches per rank, L leaves, N nodes of their trie, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.cost import CostModel
from mcore_prefix_tree.plan.cuts import Run, fewest_runs, least_repeating_runs, longest_runs, reach
from mcore_prefix_tree.plan.pack import EMPTY, Leaves, SubtreePlacer, deal
from mcore_prefix_tree.trie import Trie, trie_from_order

Int64Array = npt.NDArray[np.int64]

# Of each rank, so many leaves are looked at for a move, and so many moves are made for every rank there is.
_CANDIDATES = 64
_MOVES_PER_RANK = 4


def refine(
    leaves: Leaves,
    cost_model: CostModel,
    bin_of: Int64Array,
    *,
    ranks: int,
    bins_per_rank: int,
    max_tokens: int,
    enough: int,
    load: Int64Array | None = None,
) -> Int64Array:
    """Return a better assignment, int64 ``[L]``, or the same.

    Each move takes one leaf from the slowest rank to a bin of another, the pair that makes the slower of the two
    fastest, until none helps or a rank costs less than ``enough`` units. ``bin_of``, int64 ``[L]``, is the bin of each
    leaf; rank r has the bins from ``r * bins_per_rank`` on, and ``load``, int64 ``[D]``, already.
    """
    bins = ranks * bins_per_rank
    rank_of = np.arange(bins) // bins_per_rank
    bin_of = bin_of.copy()
    members = [leaves.some(np.flatnonzero(bin_of == one)) for one in range(bins)]
    units = np.bincount(rank_of, weights=[own.units(cost_model) for own in members], minlength=ranks).astype(np.int64)
    units += 0 if load is None else load
    tokens = np.array([own.room(cost_model) for own in members], dtype=np.int64)
    path_units = cost_model.units_of_path(leaves.length) + cost_model.units_of_scored(leaves.scored)
    path_units += cost_model.units_of_segment
    tree_of = np.cumsum(leaves.context == 0) - 1
    borders = np.append(np.flatnonzero(leaves.context == 0), len(leaves))

    for _ in range(_MOVES_PER_RANK * ranks):
        slowest = int(units.argmax())
        before = int(units[slowest])
        best: tuple[int, int, int, Int64Array, Int64Array] | None = None
        own = np.flatnonzero(rank_of[bin_of] == slowest)
        for leaf in own[:: -(-len(own) // _CANDIDATES)].tolist() if before > enough else ():
            tree = tree_of[leaf]
            common = _in_common(leaves.context, leaf, int(borders[tree]), int(borders[tree + 1]), bin_of, bins)
            added = path_units[leaf] - cost_model.units_of_path(common)
            after = np.maximum(units[rank_of] + added, before - added[bin_of[leaf]])
            added_tokens = leaves.length[leaf] - cost_model.saved_tokens(common)
            fits = (tokens + added_tokens <= max_tokens) & (rank_of != slowest)
            after = np.where(fits, after, before)
            to = int(after.argmin())
            if after[to] < before and (best is None or after[to] < best[0]):
                best = int(after[to]), leaf, to, added, added_tokens
        if best is None:
            return bin_of
        _, leaf, to, added, added_tokens = best
        source = int(bin_of[leaf])
        for one, sign in ((source, -1), (to, 1)):
            units[rank_of[one]] += sign * added[one]
            tokens[one] += sign * added_tokens[one]
        bin_of[leaf] = to
    return bin_of


def _in_common(context: Int64Array, leaf: int, start: int, end: int, bin_of: Int64Array, bins: int) -> Int64Array:
    """int64 ``[B]``: tokens of a leaf's path that each bin computes for other leaves of the tree ``start:end``."""
    # Writing from far to near leaves the nearest leaf of each bin, which has most in common.
    left = np.zeros(bins, dtype=np.int64)
    left[bin_of[start:leaf]] = np.minimum.accumulate(context[leaf:start:-1])[::-1]
    right = np.zeros(bins, dtype=np.int64)
    right[bin_of[leaf + 1 : end][::-1]] = np.minimum.accumulate(context[leaf + 1 : end])[::-1]
    return np.maximum(left, right)


# Leaves of a rank's micro-batches: indices, in increasing order.
RankBins = list[Int64Array]

# How far above the lower bound the slowest bin may be, tried in this order.
_SLACK = (0, 3, 10, 20, 30, 40, 50, 60, 70, 85, 100, 150, 200, 300, 500)
_GOOD_ENOUGH = 10  # thousandths above the lower bound


def balance(
    leaves: Leaves, cost_model: CostModel, *, dp_size: int, micro_batches: int, max_tokens: int, bubble: float = 0.0
) -> list[RankBins]:
    """Return the best assignment found of leaves to D ranks of K micro-batches, enough for ``fewest_runs``."""
    trie = trie_from_order(np.arange(len(leaves)), leaves.context, leaves.length)
    least = least_makespan(
        trie, cost_model, dp_size=dp_size, micro_batches=micro_batches, max_tokens=max_tokens, scored=leaves.scored
    )
    least -= cost_model.units_of_micro_batch * micro_batches  # which every plan has
    search = _Search(leaves, cost_model, dp_size, micro_batches, max_tokens, least, bubble)
    search.even_runs()
    search.least_repeating_runs()
    search.whole_trees()
    return search.best


def balance_around(leaves: Leaves, cost_model: CostModel, load: Int64Array, *, max_tokens: int) -> list[RankBins]:
    """Return the best assignment found of leaves to D ranks that have ``load``, int64 ``[D]`` units, already.

    Each rank has the fewest micro-batches that repeat the least.
    """
    ranks, places = len(load), np.arange(len(leaves))

    def cut(chosen: Int64Array) -> RankBins:
        own = leaves.some(chosen)
        saved = own.saved_tokens(cost_model)
        repeats = cost_model.units_of_path(own.context)
        runs = least_repeating_runs(saved, own.length - saved, max_tokens, repeats=repeats)
        return [chosen[slice(*run)] for run in runs]

    def slowest(found: list[RankBins]) -> int:
        costs = [sum(leaves.some(chosen).units(cost_model) for chosen in rank) for rank in found]
        return int((load + costs).max())

    whole = cut(places)
    costs = [leaves.some(chosen).units(cost_model) for chosen in whole]
    dealt = deal(costs, ranks, size=[1] * len(costs), room=len(costs), load=load.tolist()).ranks
    best = [[whole[at] for at in rank] for rank in dealt]
    makespan, placer = slowest(best), SubtreePlacer(leaves, cost_model)
    least = max(int(load.max()), -(-(int(load.sum()) + leaves.units(cost_model)) // ranks))
    without_limit = int(leaves.length.sum())
    for slack in _SLACK:
        limit = least + least * slack // 1000
        if limit >= makespan:
            break
        bin_of = placer.place(
            ranks=ranks, bins_per_rank=1, max_units=limit, max_tokens=without_limit, by_size=False, load=load
        )
        if bin_of is None:
            continue
        enough = least + least * _GOOD_ENOUGH // 1000
        refined = refine(
            *(leaves, cost_model, bin_of),
            ranks=ranks,
            bins_per_rank=1,
            max_tokens=without_limit,
            enough=enough,
            load=load,
        )
        for one in (bin_of, refined):
            found = [cut(chosen) for chosen in _members(one, ranks)]
            if (cost := slowest(found)) < makespan:
                best, makespan = found, cost
    return best


@dataclass(eq=False)
class _Search:
    """The best assignment so far, and the constructions that look for a better one."""

    leaves: Leaves
    cost_model: CostModel
    dp_size: int
    micro_batches: int
    max_tokens: int
    least: int
    bubble: float

    def __post_init__(self) -> None:
        self.best: list[RankBins] = []
        self.makespan = -1
        self.context = self.cost_model.units_of_path(self.leaves.context)
        self.fresh = self.leaves.fresh_units(self.cost_model)
        self.saved = self.leaves.saved_tokens(self.cost_model)
        self.fresh_tokens = self.leaves.length - self.saved

    def done(self) -> bool:
        # The largest micro-batch is no smaller than the average one.
        bound = self.least + round(self.bubble * self.least / self.micro_batches)
        return self.makespan * 1000 <= bound * (1000 + _GOOD_ENOUGH)

    def cost_of(self, rank: RankBins) -> int:
        costs = [self.leaves.some(chosen).units(self.cost_model) for chosen in rank]
        return sum(costs) + round(self.bubble * max(costs))

    def consider(self, ranks: list[RankBins]) -> None:
        slowest = max(map(self.cost_of, ranks))
        if not self.best or slowest < self.makespan:
            self.best, self.makespan = ranks, slowest

    def even_runs(self) -> None:
        """Try D * K runs of the order, the most expensive as cheap as it can be."""
        furthest = reach(self.saved, self.fresh_tokens, self.max_tokens)
        runs = _cheapest_runs(self.context, self.fresh, self.dp_size * self.micro_batches, furthest)
        assert runs is not None, "the caller has made sure that the fewest runs are few enough"
        self.deal([np.arange(*run) for run in runs])

    def least_repeating_runs(self) -> None:
        """Try cuts that repeat the least. A single rank's cost is the sum, which this makes as small as runs can."""
        if self.done() or self.micro_batches == 1:
            return
        count, room = self.dp_size * self.micro_batches, (self.fresh_tokens, self.max_tokens)
        runs = least_repeating_runs(self.saved, *room, repeats=self.context)
        self.deal([np.arange(*run) for run in (runs if len(runs) <= count else fewest_runs(self.saved, *room))])

    def whole_trees(self) -> None:
        """Try complete trees in the ranks' micro-batches, and cut those that none can hold."""
        if self.done() or self.dp_size * self.micro_batches == 1:
            return
        placer = SubtreePlacer(self.leaves, self.cost_model)
        for slack in _SLACK:
            limit = self.least + self.least * slack // 1000
            if limit >= self.makespan:
                return
            for by_size, empty in ((False, EMPTY), (True, EMPTY), (False, 4 * EMPTY)):
                bin_of = placer.place(
                    ranks=self.dp_size,
                    bins_per_rank=self.micro_batches,
                    max_units=limit,
                    max_tokens=self.max_tokens,
                    by_size=by_size,
                    empty=empty,
                )
                if bin_of is not None:
                    self.consider_bins(bin_of)
            if self.makespan <= limit:
                return

    def consider_bins(self, bin_of: Int64Array) -> None:
        """Consider D * K bins, K per rank, ``bin_of`` int64 ``[L]``, and the result of moving leaves between them."""
        count = self.micro_batches
        refined = refine(
            self.leaves,
            self.cost_model,
            bin_of,
            ranks=self.dp_size,
            bins_per_rank=count,
            max_tokens=self.max_tokens,
            enough=self.least + self.least * _GOOD_ENOUGH // 1000,
        )
        for one in (bin_of, refined):
            bins = _members(one, self.dp_size * count)
            self.consider([bins[at : at + count] for at in range(0, len(bins), count)])

    def deal(self, bins: list[Int64Array]) -> None:
        """Deal bins, int64 ``[n]`` each, to the ranks and consider the result."""
        bins = bins + [np.arange(0)] * (self.dp_size * self.micro_batches - len(bins))
        cost = [self.leaves.some(chosen).units(self.cost_model) for chosen in bins]
        dealt = deal(cost, self.dp_size, size=[1] * len(bins), room=self.micro_batches)
        self.consider([[bins[index] for index in rank] for rank in dealt.ranks])


def _members(bin_of: Int64Array, bins: int) -> list[Int64Array]:
    """Return the contents of each bin, in increasing order, from the bin of each leaf, int64 ``[L]``."""
    sizes = np.bincount(bin_of, minlength=bins)
    return np.split(np.argsort(bin_of, kind="stable"), np.cumsum(sizes)[:-1])


def _cheapest_runs(context: Int64Array, fresh: Int64Array, count: int, furthest: Int64Array) -> list[Run] | None:
    """Return at most ``count`` runs within ``furthest`` whose maximal cost is least, to 1e-4, or None; ``[L]``."""
    low, high = int((context + fresh).max(initial=1)), int((context + fresh).sum()) + 1
    if len(longest_runs(furthest)) > count:
        return None
    while high - low > max(1, low // 10_000):
        middle = (low + high) // 2
        if len(longest_runs(np.minimum(reach(context, fresh, middle), furthest))) <= count:
            high = middle
        else:
            low = middle
    return longest_runs(np.minimum(reach(context, fresh, high), furthest))


def least_makespan(
    trie: Trie,
    cost_model: CostModel,
    *,
    dp_size: int,
    micro_batches: int = 1,
    max_tokens: int | None = None,
    scored: Int64Array | None = None,
) -> int:
    """Return a lower bound of any plan's slowest rank, in units of :meth:`CostModel.units_of_path`.

    Say the slowest rank costs M. A rank that works below a node computes the path down to the node's end too, so only
    ``M - path`` remain for the nodes below. So at least ``ceil(below / (M - path))`` ranks compute that node; ``below``
    counts the nodes below as often as this rule repeats them, from the leaves up, and once the cost of scoring each
    sample, at its end, and of the segment that each leaf ends. The same with tokens and the budget counts
    micro-batches. If the forest with these repeats costs more than ``dp_size * M``, no plan reaches M; bisection finds
    the smallest M that this does not exclude. Also, M is at least the most expensive sample, and of the ``k * dp_size +
    1`` leaves with the most unshared cost, k + 1 meet on one rank.

    Args:
        max_tokens: largest number of physical tokens of a micro-batch, at least those of the longest sample; None for
            any number.
        scored: int64 ``[S]``, scored tokens of each sample in the trie's order of them: see ``plan.pack.first_scored``;
            None if scoring costs nothing.
    """
    overhead = cost_model.units_of_micro_batch * micro_batches
    if not trie.num_nodes:
        return overhead
    lengths = np.diff(trie.cu_node_lens)
    ends = trie.node_depth + lengths
    end_cost = cost_model.units_of_path(ends)
    own_cost = end_cost - cost_model.units_of_path(trie.node_depth)
    parent = trie.node_parent.tolist()
    scoring, most_scoring = np.zeros(trie.num_nodes, dtype=np.int64), np.zeros(trie.num_nodes, dtype=np.int64)
    if scored is not None:
        sample_scores = cost_model.units_of_scored(scored)
        np.add.at(scoring, trie.sample_node, sample_scores)
        np.maximum.at(most_scoring, trie.sample_node, sample_scores)
    for at_end in (scoring, most_scoring):
        at_end[_is_leaf(trie)] += cost_model.units_of_segment

    times = [1] * trie.num_nodes
    if max_tokens is not None:
        _repeats(parent, lengths.tolist(), (max_tokens - ends).tolist(), times, [0] * trie.num_nodes)

    def excluded(slowest: int) -> bool:
        # Bisection stays at or above the most expensive path, so no node is left without room that needs some.
        total = _repeats(parent, own_cost.tolist(), (slowest - end_cost).tolist(), times.copy(), scoring.tolist())
        return total > dp_size * slowest

    low = max(int((end_cost + most_scoring).max()), _meeting_leaves(trie, own_cost + most_scoring, dp_size))
    if not excluded(low):
        return low + overhead
    # The smallest M that is not excluded lies in (low, high].
    high = 2 * low
    while excluded(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 10_000):
        middle = (low + high) // 2
        if excluded(middle):
            low = middle
        else:
            high = middle
    return low + overhead


def _repeats(parent: list[int], own: list[int], room: list[int], times: list[int], below: list[int]) -> int:
    """Raise each node's ``times`` until ``room`` holds ``below``, at first the node ends; return the total cost."""
    total = 0
    for node in range(len(parent) - 1, -1, -1):
        if below[node] > room[node]:
            times[node] = max(times[node], -(-below[node] // room[node]))
        cost = below[node] + times[node] * own[node]
        if parent[node] >= 0:
            below[parent[node]] += cost
        else:
            total += cost
    return total


def _is_leaf(trie: Trie) -> npt.NDArray[np.bool_]:
    is_leaf = np.ones(trie.num_nodes, dtype=bool)
    is_leaf[trie.node_parent[trie.node_parent >= 0]] = False
    return is_leaf


def _meeting_leaves(trie: Trie, own_cost: Int64Array, dp_size: int) -> int:
    """Return the unshared cost of leaves that must meet on one rank; ``own_cost`` is int64 ``[N]``."""
    private = np.sort(own_cost[_is_leaf(trie)])[::-1]
    summed = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(private)])
    rounds = np.arange(1, (len(private) - 1) // dp_size + 1)
    meet = summed[rounds * dp_size + 1] - summed[rounds * dp_size - rounds]
    return int(meet.max(initial=0))
