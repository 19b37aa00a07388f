"""Runs of the depth-first order under a budget: the fewest, the most even, and those that repeat the least.

A run of samples brings the whole path of its first one, and of every later one what it does not share with its
predecessor: ``context[start] + fresh[start:end].sum()``, in tokens or in any other cost of unique tokens. What a cut
before sample i repeats is ``context[i]``.

Legend: S samples.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Run = tuple[int, int]


def fewest_runs(context: Array, fresh: Array, budget: float) -> list[Run]:
    """As few runs as the budget allows, each as long as it allows.

    Args:
        context: ``[S]``, what the path of each sample has in common with the one before; 0 for the first.
        fresh: ``[S]``, what each sample adds to the one before.
        budget: for each run. A sample that does not fit it by itself is a run of its own.

    Returns:
        ``(start, end)`` of each run.
    """
    ends = np.cumsum(fresh)
    # A run from ``start`` holds what ends by here.
    reach = np.searchsorted(ends, budget + (ends - fresh) - context, side="right")
    runs = []
    start = 0
    while start < len(fresh):
        end = max(int(reach[start]), start + 1)
        runs.append((start, end))
        start = end
    return runs


def smallest_budget(context: npt.NDArray[np.int64], fresh: npt.NDArray[np.int64], count: int, high: int) -> int:
    """The smallest budget under which ``count`` runs are enough, if ``high`` is one that is; in whole units."""
    low = int((context + fresh).max(initial=1))
    while low < high:
        middle = (low + high) // 2
        if len(fewest_runs(context, fresh, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return low


def least_repeating_runs(context: Array, fresh: Array, budget: float, *, per_run: float = 0.0) -> list[Run]:
    """The runs under the budget that repeat the least, among all ways to cut the order.

    Minimises the sum over runs of ``context[start] + per_run``; of equal sums, the fewest runs. Dynamic programming
    over the ends of runs: ``best[j] = min over i of best[i] + context[i] + per_run`` where the run i:j fits. Where a
    run may begin only moves on with its end (what a sample shares is no more than its predecessor's path), so the
    minimum over that window is kept in a queue: O(S).

    Args:
        context: as in :func:`fewest_runs`.
        fresh: as in :func:`fewest_runs`.
        budget: for each run. A sample that does not fit it by itself is a run of its own.
        per_run: what a run costs besides.
    """
    count = len(fresh)
    ends = np.cumsum(fresh)
    offset = (ends - fresh - context).tolist()  # a run i:j fits if ends[j - 1] - offset[i] <= budget
    repeats = (np.asarray(context) + per_run).tolist()
    best: list[tuple[float, int]] = [(0, 0)]  # by end: sum, runs
    first: list[int] = []  # by end - 1: where the last run begins
    window: deque[tuple[tuple[float, int], int]] = deque()
    for last, end in enumerate(ends.tolist()):
        total, runs = best[last]
        candidate = (total + repeats[last], runs + 1)
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
