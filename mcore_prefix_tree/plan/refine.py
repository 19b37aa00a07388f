"""Moves of L leaves among B bins, from the slowest rank to others, as long as that makes it faster."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.cost import CostModel
from mcore_prefix_tree.plan.pack import Leaves

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
) -> Int64Array:
    """Return a better assignment, int64 ``[L]``, or the same.

    Each move takes one leaf from the slowest rank to a bin of another, the pair that makes the slower of the two
    fastest, until none helps or a rank costs less than ``enough`` units. ``bin_of``, int64 ``[L]``, is the bin of each
    leaf; rank r has the bins from ``r * bins_per_rank`` on.
    """
    bins = ranks * bins_per_rank
    rank_of = np.arange(bins) // bins_per_rank
    bin_of = bin_of.copy()
    members = [leaves.some(np.flatnonzero(bin_of == one)) for one in range(bins)]
    units = np.bincount(rank_of, weights=[own.units(cost_model) for own in members], minlength=ranks).astype(np.int64)
    tokens = np.array([own.tokens for own in members], dtype=np.int64)
    path_units = cost_model.units_of_path(leaves.length) + cost_model.units_of_scored(leaves.scored)
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
            fits = (tokens + leaves.length[leaf] - common <= max_tokens) & (rank_of != slowest)
            after = np.where(fits, after, before)
            to = int(after.argmin())
            if after[to] < before and (best is None or after[to] < best[0]):
                best = int(after[to]), leaf, to, added, leaves.length[leaf] - common
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
