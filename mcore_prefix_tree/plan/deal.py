"""Deal units, for example micro-batches or groups of rollouts, to ranks that take an equal number of rows each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Dealt(NamedTuple):
    """Indices of the units of each rank, and of those that found no room."""

    ranks: list[list[int]]
    left: list[int]


def deal(cost: Sequence[int], ranks: int, *, size: Sequence[int], room: int) -> Dealt:
    """Deal the costliest unit first to the cheapest rank with ``room`` for its rows, then exchange units."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load, free, left = [0] * ranks, [room] * ranks, []
    with_room = [(0, rank) for rank in range(ranks)]  # a heap
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
            if not theirs:
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
