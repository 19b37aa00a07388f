"""The tree as a few rectangles and triangles: a cut of the visible pairs into spans of queries and spans of keys.

In depth-first order the tokens below a segment are one flat span, and a segment with its first child, that one's first
child and so on is a contiguous *run* along a single path. So the visible pairs are

- a triangle per run: its tokens see it causally;
- a rectangle per *branch*, a segment with tokens below it outside its run: they too are one flat span, and each of them
  sees the complete segment.

Empty segments have neither queries nor keys and do not appear; neither does padding, which is no part of the tree. Nor
do queries among the ``unread`` first tokens: every segment of these is a branch, for what is below it behind them.

Legend: T tokens, U of them unread, R runs, B branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.metadata import TreeMetadata

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Flat spans, each a start and an exclusive end, in depth-first pre-order. No pair is in two of them."""

    runs: Int64Array  # int64 [R + 1], borders of the runs, which follow each other from U to T
    queries: Int64Array  # int64 [B, 2], tokens below a branch and outside its run. Two of these are nested or disjoint.
    keys: Int64Array  # int64 [B, 2], the branch itself. These are disjoint.
    depth: Int64Array  # int64 [B], number of other spans of queries that a branch's lies in


def cut_into_spans(metadata: TreeMetadata) -> Spans:
    """Return the spans of a micro-batch."""
    unread, tokens = min(metadata.unread, metadata.num_tokens), metadata.num_tokens
    borders = np.union1d(metadata.segments.cu_lens.astype(np.int64), [0, unread])
    start, end = borders[:-1][borders[1:] <= tokens], borders[1:][borders[1:] <= tokens]
    subtree_end = metadata.host_subtree_end[start].astype(np.int64)

    # In pre-order the next segment is a child of this one exactly if there is anything below this one.
    is_head = np.append(True, subtree_end[:-1] == end[:-1])[: len(start)]
    is_head[start == unread] = True
    is_read = start >= unread
    runs = np.append(start[is_head & is_read], tokens)
    # Of a segment that is not read, all queries below it are behind those tokens.
    run_end = np.full(len(start), unread)
    run_end[is_read] = runs[np.cumsum(is_head[is_read])]
    branches = subtree_end > run_end
    queries = np.stack([run_end, subtree_end], axis=1)[branches]
    return Spans(
        runs=runs,
        queries=queries,
        keys=np.stack([start, end], axis=1)[branches],
        depth=_nesting(start[branches], subtree_end[branches]),
    )


def _nesting(start: Int64Array, end: Int64Array) -> Int64Array:
    """Count the earlier subtrees, int64 ``[n]`` in pre-order, that each ``start:end`` lies in: nested or disjoint."""
    depth = np.empty(len(start), dtype=np.int64)
    open_ends: list[int] = []
    for index, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= first:
            open_ends.pop()
        depth[index] = len(open_ends)
        open_ends.append(last)
    return depth
