"""Placement of a forest's leaves in bins, whose common paths count once; and of bins on ranks.

A sample that another one continues costs nothing in the same micro-batch: only leaves, the samples that none continues,
have to be placed, and the others follow. :class:`SubtreePlacer` starts from complete trees and cuts one only if no bin
can hold it: best fit for items that may be broken, at the price of a path that both parts compute.

Legend: L leaves, B bins, S samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout.forest import branching
from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN, CostModel
from mcore_prefix_tree.plan.cuts import Run
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import trie_from_order

Int64Array = npt.NDArray[np.int64]

# A cut may leave one part of so many of a bin empty if the path that it repeats is shorter there.
EMPTY = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaves:
    """The leaves of a forest, or some of them, in depth-first order."""

    # int64 [L], the first sample, in depth-first order, that belongs to each leaf; it ends with the leaf.
    start: Int64Array
    end: Int64Array  # int64 [L], exclusive
    length: Int64Array  # int64 [L], tokens of the leaf's path
    context: Int64Array  # int64 [L], leading tokens of that path in common with the leaf before; 0 for the first
    scored: Int64Array  # int64 [L], cost of scoring the samples of each leaf: see first_scored

    def __len__(self) -> int:
        return len(self.length)

    @classmethod
    def of_samples(cls, shared: Int64Array, lengths: Int64Array, scored: Int64Array | None = None) -> Leaves:
        """Return the leaves among samples, as in ``trie_from_order``, int64 ``[S]``; ``scored`` None if it is free."""
        scored = np.zeros(len(shared), dtype=np.int64) if scored is None else scored
        continues = np.append(shared, 0)[1:] == lengths
        last = np.flatnonzero(~continues)
        start = np.append(0, last + 1)[:-1]
        context = np.minimum.reduceat(shared, start) if len(start) else shared
        scored = np.add.reduceat(scored, start) if len(start) else scored
        return cls(start=start, end=last + 1, length=lengths[last], context=context, scored=scored)

    @classmethod
    def every_sample(cls, shared: Int64Array, lengths: Int64Array, scored: Int64Array | None = None) -> Leaves:
        """Return all samples in depth-first order, even if others continue them; for ``[S]`` see :meth:`of_samples`."""
        start = np.arange(len(shared))
        scored = np.zeros(len(shared), dtype=np.int64) if scored is None else scored
        return cls(start=start, end=start + 1, length=lengths, context=shared, scored=scored)

    def some(self, chosen: Int64Array) -> Leaves:
        """Return the leaves at ``chosen``, increasing indices int64 ``[n]``, with their contexts among themselves."""
        context = np.zeros(len(chosen), dtype=np.int64)
        if len(chosen) > 1:
            # Two leaves have as many tokens in common as the least similar neighbours between them.
            first, last = chosen[[0, -1]]
            context[1:] = np.minimum.reduceat(self.context[first : last + 1], chosen[:-1] + 1 - first)
        return Leaves(
            start=self.start[chosen],
            end=self.end[chosen],
            length=self.length[chosen],
            context=context,
            scored=self.scored[chosen],
        )

    @property
    def tokens(self) -> int:
        """Unique tokens of all."""
        return int((self.length - self.context).sum())

    def saved_tokens(self, cost_model: CostModel | None) -> Int64Array:
        """Return int64 ``[L]``: tokens of the budget that each saves next to the one before.

        One that continues the one before makes no branch point.
        """
        if cost_model is None or not cost_model.state_tokens:
            return self.context
        continues = np.append(-1, self.length[:-1]) == self.context
        return np.where(continues, self.context, cost_model.saved_tokens(self.context))

    def room(self, cost_model: CostModel | None) -> int:
        """Tokens of the budget that all take in one micro-batch: theirs, and those that states count as."""
        return int((self.length - self.saved_tokens(cost_model)).sum())

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all in one micro-batch."""
        return int((self.length * (self.length + 1) // 2 - self.context * (self.context + 1) // 2).sum())

    def fresh_units(self, cost_model: CostModel) -> Int64Array:
        """Return int64 ``[L]``: the cost that each adds to the one before, its own segment included."""
        path = cost_model.units_of_path(self.length) - cost_model.units_of_path(self.context)
        return path + cost_model.units_of_scored(self.scored) + cost_model.units_of_segment

    def units(self, cost_model: CostModel) -> int:
        """Cost of all in one micro-batch, its overhead aside."""
        units = int(self.fresh_units(cost_model).sum())
        if cost_model.units_of_level:
            nodes = trie_from_order(np.arange(len(self)), self.context, self.length).node_parent
            units += cost_model.units_of_level * branching(nodes).segment_levels
        return units


def first_scored(samples: Sequence[Sample], order: Int64Array, shared: Int64Array) -> Int64Array:
    """Return int64 ``[S]``: for samples in depth-first order, the scored tokens not shared with the sample before.

    This nearly equals the tokens that a micro-batch of them scores: completions of one prompt share no scored tokens,
    and each sample of a conversation scores one turn, the shorter ones first. Tokens that two samples score together,
    but in different micro-batches, count once.
    """
    return np.fromiter(
        (
            np.count_nonzero(samples[index].loss_mask[max(1, start) :])
            for index, start in zip(order.tolist(), shared.tolist(), strict=True)
        ),
        dtype=np.int64,
        count=len(order),
    )


class SubtreePlacer:
    """Places the leaves of a forest under a limit."""

    def __init__(self, leaves: Leaves, cost_model: CostModel) -> None:
        self._context = leaves.context
        self._cost_model = cost_model
        self._path_units = cost_model.units_of_path(leaves.context)
        self._saved_tokens = leaves.saved_tokens(cost_model)
        fresh_units = leaves.fresh_units(cost_model)
        self._units = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(fresh_units)])
        self._tokens = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(leaves.length - self._saved_tokens)])
        roots = np.flatnonzero(leaves.context == 0)
        self._trees = list(zip(roots.tolist(), [*roots[1:].tolist(), len(leaves)], strict=True)) if len(leaves) else []

    def place(
        self,
        *,
        ranks: int,
        bins_per_rank: int,
        max_units: int,
        max_tokens: int,
        by_size: bool,
        load: Int64Array | None = None,
        empty: int = EMPTY,
    ) -> Int64Array | None:
        """Return a bin for every leaf, int64 ``[L]``, such that no limit is exceeded; None if this finds none.

        A complete tree is placed in the bin to which it adds least, of several such in that of the fullest rank. One
        that fits nowhere is cut: the bin with the most room takes as many of its first leaves as it can hold, and the
        rest is a tree to place like the others. Bins are those of :func:`~mcore_prefix_tree.plan.balance.refine`.

        Args:
            max_units: largest cost of a rank, in units.
            max_tokens: budget of a bin.
            load: int64 ``[D]``, units that each rank has already; nothing by default.
            empty: a cut may leave ``1 / empty`` of a bin unused if the path that it repeats is shorter there.
            by_size: whether the most expensive tree comes first. Otherwise trees that exceed every bin come first, then
                those whose leaves have most in common: the last ones are cut to fill the bins, at the least price.
        """
        bins = ranks * bins_per_rank
        rank_of = np.arange(bins) // bins_per_rank
        bin_of = np.full(len(self._context), -1, dtype=np.int64)
        units, tokens = np.zeros(ranks, dtype=np.int64), np.zeros(bins, dtype=np.int64)
        units += 0 if load is None else load

        def urgency(run: Run) -> tuple[bool, int]:
            cost = self._units_of(run)
            if by_size:
                return False, -cost
            return cost <= max_units and self._tokens_of(run) <= max_tokens, -self._price(run)

        waiting = [(urgency(run), run, tree) for tree, run in enumerate(self._trees)]
        heapq.heapify(waiting)
        while waiting:
            _, (start, end), tree = heapq.heappop(waiting)
            common = self._in_common(start, self._trees[tree][0], bin_of, bins)
            saved, saved_tokens = self._cost_model.units_of_path(common), self._cost_model.saved_tokens(common)
            room, room_tokens = max_units - units[rank_of] + saved, max_tokens - tokens + saved_tokens
            fits = np.flatnonzero(
                (room >= self._units_of((start, end))) & (room_tokens >= self._tokens_of((start, end)))
            )
            stop = end
            if len(fits):
                chosen = int(fits[np.lexsort((tokens[fits], room[fits], -saved[fits]))[0]])
            else:
                chosen = int(np.argmax(np.minimum(room, room_tokens * UNITS_PER_TOKEN)))
                stop = self._cut(start, end, int(room[chosen]), int(room_tokens[chosen]), empty)
                if stop == start:
                    return None
            bin_of[start:stop] = chosen
            units[chosen // bins_per_rank] += self._units_of((start, stop)) - saved[chosen]
            tokens[chosen] += self._tokens_of((start, stop)) - saved_tokens[chosen]
            if stop < end:
                heapq.heappush(waiting, (urgency((stop, end)), (stop, end), tree))
        return bin_of

    def _price(self, run: Run) -> int:
        """Return the least that a cut through a run repeats; all of a single leaf, which cannot be cut."""
        start, end = run
        if end - start == 1:
            return self._units_of(run)
        return int(self._path_units[start + 1 : end].min())

    def _units_of(self, run: Run) -> int:
        start, end = run
        return int(self._units[end] - self._units[start] + self._path_units[start])

    def _tokens_of(self, run: Run) -> int:
        start, end = run
        return int(self._tokens[end] - self._tokens[start] + self._saved_tokens[start])

    def _in_common(self, start: int, root: int, bin_of: Int64Array, bins: int) -> Int64Array:
        """Return int64 ``[B]``: tokens above a leaf that each bin computes already; placed leaves come first."""
        common = np.zeros(bins, dtype=np.int64)
        if start > root:
            narrowest = np.minimum.accumulate(self._context[start:root:-1])[::-1]
            common[bin_of[root:start]] = narrowest  # of a bin's leaves the last stays, which has most in common
        return common

    def _cut(self, start: int, end: int, max_units: int, max_tokens: int, empty: int) -> int:
        """Return the end of a run from ``start``: near the limits, at the shortest path that the rest repeats."""

        def furthest(limit: int, limit_tokens: int) -> int:
            by_units = np.searchsorted(self._units, limit - self._path_units[start] + self._units[start], side="right")
            by_tokens = np.searchsorted(
                self._tokens, limit_tokens - self._saved_tokens[start] + self._tokens[start], side="right"
            )
            return min(int(by_units), int(by_tokens), end) - 1

        last = furthest(max_units, max_tokens)
        if last <= start:
            return start
        first = max(start + 1, furthest(max_units - max_units // empty, max_tokens - max_tokens // empty))
        # Of equal ones the last.
        return last - int(np.argmin(self._context[first : last + 1][::-1]))


class Dealt(NamedTuple):
    """Indices of the units, for example micro-batches, of each rank, and of those that found no room."""

    ranks: list[list[int]]
    left: list[int]


def deal(
    cost: Sequence[int], ranks: int, *, size: Sequence[int], room: int, load: Sequence[int] | None = None
) -> Dealt:
    """Deal the costliest unit first to the cheapest rank with ``room`` for its rows, then exchange units.

    ``load`` is the cost that each rank has already; nothing by default.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load, free, left = list(load or [0] * ranks), [room] * ranks, []
    with_room = sorted(zip(load, range(ranks), strict=True))  # a heap
    for unit in sorted(range(len(cost)), key=lambda unit: -cost[unit]):
        full = []
        while with_room and free[with_room[0][1]] < size[unit]:
            full.append(heapq.heappop(with_room))
        if with_room:
            rank = with_room[0][1]
            dealt[rank].append(unit)
            load[rank] += cost[unit]
            free[rank] -= size[unit]
            if free[rank]:
                heapq.heapreplace(with_room, (load[rank], rank))
            else:
                heapq.heappop(with_room)
        else:
            left.append(unit)
        for entry in full:
            heapq.heappush(with_room, entry)
    if len(cost) > ranks:
        _swap(dealt, load, np.asarray(cost, dtype=np.int64), np.asarray(size, dtype=np.int64))
    return Dealt(dealt, left)


def _swap(ranks: list[list[int]], load: list[int], cost: Int64Array, size: Int64Array) -> None:
    """Exchange two units of one size between the heaviest rank and another while the heavier gets lighter; ``[n]``."""
    for _ in range(4 * len(ranks)):
        heavy = int(np.argmax(load))
        best: tuple[int, int, int, int] | None = None
        for light in heapq.nsmallest(min(8, len(ranks) - 1), range(len(ranks)), key=load.__getitem__):
            mine, theirs = ranks[heavy], ranks[light]
            if not mine or not theirs:
                continue
            gain = cost[mine][:, None] - cost[theirs][None, :]
            after = np.maximum(load[heavy] - gain, load[light] + gain)
            after[size[mine][:, None] != size[theirs][None, :]] = load[heavy]
            at = int(np.argmin(after))
            value = int(after.flat[at])
            if value < load[heavy] and (best is None or value < best[0]):
                best = (value, light, *divmod(at, len(theirs)))
        if best is None:
            return
        _, light, one, other = best
        moved = int(cost[ranks[heavy][one]] - cost[ranks[light][other]])
        ranks[heavy][one], ranks[light][other] = ranks[light][other], ranks[heavy][one]
        load[heavy] -= moved
        load[light] += moved
