"""An order of samples made for folding: neighbours in the trie fall into the same step.

The lines (or groups, or pairs) form a circle in depth-first order of the trie. Each epoch starts at a random sample of
the circle, cuts it into runs, one per step, and deals the runs in random order. If a line does not fit the rest of a
run, one of the next few lines that fits takes its place, since both parts of a cut line compute the shared tokens.

Over the seeds, each step of an epoch takes each sample with the same probability, as with shuffling: the circle's start
is uniformly random, which settles the steps that an epoch shares with its neighbours, and so is the place of each
other run. Unlike with shuffling, the samples of one step depend on each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import sort_samples

Int64Array = npt.NDArray[np.int64]
Piece = tuple[int, int, int]  # a line's place on the circle, how much of the line comes before the piece, its size

# How many lines may give way to a later one.
_LOOK_AHEAD = 16


def trie_order(lines: Sequence[Sequence[Sample]]) -> Int64Array:
    """Return the lines' indices, int64 ``[n]``, in depth-first order of the trie by each line's longest sample."""
    order, _ = sort_samples([max(line, key=len) for line in lines])
    return order


def deal_runs(sizes: Int64Array, *, step: int, head: int, start: int, rng: np.random.Generator) -> Int64Array:
    """Cut a circle of lines into runs and put the complete runs in random order.

    Args:
        sizes: int64 ``[n]``, size of each line on the circle: its number of samples, or 1 if steps count lines.
        step: size of a run.
        head: size of the first run, which completes the last step of the epoch before; 0 for none. It stays first, and
            the remainder after the last complete run stays last.
        start: position on the circle where the first run begins.

    Returns:
        int64 ``[P, 3]``, the pieces in the order drawn; see :data:`Piece`.
    """
    total = int(sizes.sum())
    head = min(head, total)
    whole = (total - head) // step
    line_starts = np.cumsum(sizes) - sizes
    borders = np.array([0, head, head + whole * step])
    cuts = np.unique(np.concatenate([line_starts, (start + borders) % total]))
    line = np.searchsorted(line_starts, cuts, side="right") - 1
    pieces = np.stack([line, cuts - line_starts[line], np.diff(cuts, append=total)], axis=1)
    along = (cuts - start) % total
    pieces = pieces[np.argsort(along)]
    first, last = np.searchsorted(np.sort(along), borders[1:])
    runs = _runs(pieces[first:last].tolist(), step)
    dealt = [piece for run in rng.permutation(len(runs)).tolist() for piece in runs[run]]
    middle = np.array(dealt, dtype=np.int64).reshape(-1, 3)
    return np.concatenate([pieces[:first], middle, pieces[last:]])


def _runs(pieces: list[Piece], step: int) -> list[list[Piece]]:
    """Return runs of exactly ``step``, cutting few pieces."""
    waiting = deque(pieces)
    runs: list[list[Piece]] = []
    room = 0
    while waiting:
        if not room:
            runs.append([])
            room = step
        fitting = (place for place, (_, _, size) in enumerate(islice(waiting, _LOOK_AHEAD)) if size <= room)
        place = next(fitting, None)
        line, before, size = waiting[place or 0]
        if place is None:
            runs[-1].append((line, before, room))
            waiting[0] = line, before + room, size - room
            room = 0
        else:
            runs[-1].append((line, before, size))
            room -= size
            del waiting[place]
    return runs
