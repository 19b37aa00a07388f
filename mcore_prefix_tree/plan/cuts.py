"""Runs of the depth-first order under a budget: the fewest, the most even, and those that repeat the least.

A run of samples costs the full path of its first one, and the tokens that every later one does not share with its
predecessor: ``context[start] + fresh[start:end].sum()``, in tokens or in any other cost of unique tokens. A cut before
sample i repeats ``context[i]``.

Legend: S samples.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Run = tuple[int, int]


def reach(context: Int64Array, fresh: Int64Array, budget: int) -> Int64Array:
    """Return int64 ``[S]``: the exclusive end of the longest run under the budget that begins with each sample.

    Args:
        context: int64 ``[S]``, cost of the path that each sample has in common with the one before; 0 for the first.
        fresh: int64 ``[S]``, cost that each sample adds to the one before.
        budget: largest cost of a run. A sample that exceeds it becomes a separate run.
    """
    ends = np.cumsum(fresh)
    furthest = np.searchsorted(ends, budget + (ends - fresh) - context, side="right")
    at_least_one: Int64Array = np.maximum(furthest, np.arange(len(fresh)) + 1)
    return at_least_one


def longest_runs(furthest: Int64Array) -> list[Run]:
    """Return ``(start, end)`` of the longest possible runs, the fewest, from each sample's reach, int64 ``[S]``."""
    ends = furthest.tolist()
    runs = []
    start = 0
    while start < len(ends):
        runs.append((start, ends[start]))
        start = ends[start]
    return runs


def fewest_runs(context: Int64Array, fresh: Int64Array, budget: int) -> list[Run]:
    """Cut into as few runs as the budget allows; ``context`` and ``fresh``, int64 ``[S]``, as in :func:`reach`."""
    return longest_runs(reach(context, fresh, budget))


def smallest_budget(context: Int64Array, fresh: Int64Array, count: int, high: int) -> int:
    """Return the smallest budget for ``count`` runs, which ``high`` allows; int64 ``[S]`` as in :func:`reach`."""
    low = int((context + fresh).max(initial=1))
    while low < high:
        middle = (low + high) // 2
        if len(fewest_runs(context, fresh, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return low


def least_repeating_runs(
    context: Int64Array, fresh: Int64Array, budget: int, *, repeats: Int64Array | None = None
) -> list[Run]:
    """Return the runs under the budget that repeat the least, among all ways to cut the order.

    Minimises the sum of ``repeats[start]`` over runs; of equal sums, takes the fewest runs. Dynamic programming over
    the ends of runs: ``best[j] = min over i of best[i] + repeats[i]`` for runs i:j that fit. The earliest start of a
    run never decreases with its end (a sample shares at most its predecessor's path), so the minimum over that window
    is kept in a queue: O(S).

    Args:
        context, fresh, budget: as in :func:`reach`, int64 ``[S]``.
        repeats: int64 ``[S]``, cost of a run that begins here in addition to its fresh part; ``context`` by default.
    """
    count = len(fresh)
    ends = np.cumsum(fresh)
    offset = (ends - fresh - context).tolist()  # a run i:j fits if ends[j - 1] - offset[i] <= budget
    cost = (context if repeats is None else repeats).tolist()
    best: list[tuple[int, int]] = [(0, 0)]  # by end: sum, runs
    first: list[int] = []  # by end - 1: start of the last run
    window: deque[tuple[tuple[int, int], int]] = deque()
    for last, end in enumerate(ends.tolist()):
        total, runs = best[last]
        candidate = (total + cost[last], runs + 1)
        while window and window[-1][0] >= candidate:
            window.pop()
        window.append((candidate, last))
        while window[0][1] < last and end - offset[window[0][1]] > budget:
            window.popleft()
        best.append(window[0][0])
        first.append(window[0][1])
    cuts: list[Run] = []
    end = count
    while end:
        cuts.append((first[end - 1], end))
        end = first[end - 1]
    return cuts[::-1]
