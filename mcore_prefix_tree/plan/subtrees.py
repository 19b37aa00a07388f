"""Place complete subtrees in bins: cut a tree only if no bin can hold it, so that few bins recompute its ancestors.

:mod:`mcore_prefix_tree.plan.pack` starts from single leaves and lets them find each other; this starts from complete
trees: best fit for items that may be broken, at the price of a path that both parts compute.

Legend: L leaves, B bins.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN, CostModel
from mcore_prefix_tree.plan.cuts import Run
from mcore_prefix_tree.plan.pack import Leaves

Int64Array = npt.NDArray[np.int64]

# A cut may leave this part of a bin empty if the path that it repeats is shorter there.
_SLACK = 8


class SubtreePlacer:
    """Places the leaves of a forest under a limit."""

    def __init__(self, leaves: Leaves, cost_model: CostModel) -> None:
        self._context = leaves.context
        self._cost_model = cost_model
        self._path_units = cost_model.units_of_path(leaves.context)
        fresh_units = leaves.fresh_units(cost_model)
        self._units = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(fresh_units)])
        self._tokens = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(leaves.length - leaves.context)])
        roots = np.flatnonzero(leaves.context == 0)
        self._trees = list(zip(roots.tolist(), [*roots[1:].tolist(), len(leaves)], strict=True)) if len(leaves) else []

    def place(
        self, *, ranks: int, bins_per_rank: int, max_units: int, max_tokens: int, by_size: bool
    ) -> Int64Array | None:
        """Return a bin for every leaf, int64 ``[L]``, such that no limit is exceeded; None if this finds none.

        A complete tree is placed in the bin to which it adds least, of several such in that of the fullest rank. One
        that fits nowhere is cut: the bin with the most room takes as many of its first leaves as it can hold, and the
        rest is a tree to place like the others. Bins are those of :func:`~mcore_prefix_tree.plan.balance.refine`.

        Args:
            max_units: largest cost of a rank, in units.
            max_tokens: largest number of tokens of a bin.
            by_size: whether the most expensive tree comes first. Otherwise trees that exceed every bin come first, then
                those whose leaves have most in common: the last ones are cut to fill the bins, at the least price.
        """
        bins = ranks * bins_per_rank
        rank_of = np.arange(bins) // bins_per_rank
        bin_of = np.full(len(self._context), -1, dtype=np.int64)
        units, tokens = np.zeros(ranks, dtype=np.int64), np.zeros(bins, dtype=np.int64)

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
            saved = self._cost_model.units_of_path(common)
            room, room_tokens = max_units - units[rank_of] + saved, max_tokens - tokens + common
            fits = np.flatnonzero(
                (room >= self._units_of((start, end))) & (room_tokens >= self._tokens_of((start, end)))
            )
            stop = end
            if len(fits):
                chosen = int(fits[np.lexsort((tokens[fits], room[fits], -saved[fits]))[0]])
            else:
                chosen = int(np.argmax(np.minimum(room, room_tokens * UNITS_PER_TOKEN)))
                stop = self._cut(start, end, int(room[chosen]), int(room_tokens[chosen]))
                if stop == start:
                    return None
            bin_of[start:stop] = chosen
            units[chosen // bins_per_rank] += self._units_of((start, stop)) - saved[chosen]
            tokens[chosen] += self._tokens_of((start, stop)) - common[chosen]
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
        return int(self._tokens[end] - self._tokens[start] + self._context[start])

    def _in_common(self, start: int, root: int, bin_of: Int64Array, bins: int) -> Int64Array:
        """Return int64 ``[B]``: tokens above a leaf that each bin computes already; placed leaves come first."""
        common = np.zeros(bins, dtype=np.int64)
        if start > root:
            narrowest = np.minimum.accumulate(self._context[start:root:-1])[::-1]
            common[bin_of[root:start]] = narrowest  # of a bin's leaves the last stays, which has most in common
        return common

    def _cut(self, start: int, end: int, max_units: int, max_tokens: int) -> int:
        """Return the end of a run from ``start``: near the limits, at the shortest path that the rest repeats."""

        def furthest(limit: int, limit_tokens: int) -> int:
            by_units = np.searchsorted(self._units, limit - self._path_units[start] + self._units[start], side="right")
            by_tokens = np.searchsorted(
                self._tokens, limit_tokens - self._context[start] + self._tokens[start], side="right"
            )
            return min(int(by_units), int(by_tokens), end) - 1

        last = furthest(max_units, max_tokens)
        if last <= start:
            return start
        first = max(start + 1, furthest(max_units - max_units // _SLACK, max_tokens - max_tokens // _SLACK))
        # Of equal ones the last.
        return last - int(np.argmin(self._context[first : last + 1][::-1]))
