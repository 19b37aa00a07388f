"""Tiles of queries and keys that meet, from one integer per token: O(T + tiles visited), on the host.

In depth-first order the queries that see key j are ``j:subtree_end[j]``. So the query blocks that see any key of a
block are one contiguous range, which the smallest and the largest ``subtree_end`` of the block cut in three:

- diagonal: ``i < j`` happens, so a tile compares both ``j <= i`` and ``i < subtree_end[j]``;
- full: every pair of existing tokens is visible and every key of the tile exists, so a tile compares nothing;
- tail: the rest; a tile compares only ``i < subtree_end[j]``.

With a window over path positions, tiles out of reach are omitted, those that the window's edge may cross are not full,
and every tile but a full one compares positions as well. Query blocks of which nobody reads a row meet no key.

Legend: P padded tokens, BM queries of a block, BN keys of a block, NQ and NK blocks of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.metadata import TreeMetadata

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """For each block of one side, the blocks of the other side that it meets."""

    # int32 [n, 4]. Block b meets blocks[bounds[b, 0]:bounds[b, 3]]: the diagonal ones end at bounds[b, 1], the full
    # ones at bounds[b, 2], then come the tails. Each kind is ascending.
    bounds: Int32Array
    blocks: Int32Array | None  # int32, or None if the bounds are block numbers themselves, not places in a list

    @cached_property
    def longest_first(self) -> Int32Array:
        """int32 ``[n]``: the blocks by how many they meet, descending; launched so, the last to finish are short."""
        met = self.bounds[:, 3] - self.bounds[:, 0]
        return np.argsort(-met, kind="stable").astype(np.int32)

    def padded(self, *, full: bool) -> tuple[Int32Array, Int32Array]:
        """Return counts ``[n]`` and ascending block numbers ``[n, most]`` of the full tiles, or all others, 0-filled.

        The form that FlexAttention and FlashAttention-4 take, except that ``most`` is the largest count (at least 1).
        """
        first, diagonal_end, full_end, last = self.bounds.astype(np.int64).T
        spans = [(diagonal_end, full_end)] if full else [(first, diagonal_end), (full_end, last)]
        row = np.concatenate([np.repeat(np.arange(len(first)), end - start) for start, end in spans])
        place = np.concatenate([_ranges(start, end) for start, end in spans])
        blocks = place if self.blocks is None else self.blocks[place]
        counts = np.bincount(row, minlength=len(first))
        order = np.lexsort((blocks, row))
        row, blocks = row[order], blocks[order]
        padded = np.zeros((len(first), max(1, int(counts.max(initial=0)))), dtype=np.int32)
        padded[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = blocks
        return counts.astype(np.int32), padded


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPlan:
    """The tiles of one micro-batch for one pair of block sizes."""

    # query_block, key_block: BM and BN.
    query_block: int
    key_block: int
    by_key: Tiles  # the query blocks of each of NK key blocks; a contiguous range each, unless there is a window
    by_query: Tiles  # the key blocks of each of NQ query blocks
    visited: int
    visible_pairs: int  # (query, key) pairs that attention computes, padding included

    @property
    def efficiency(self) -> float:
        """Visible pairs over the pairs of all visited tiles."""
        return self.visible_pairs / (self.visited * self.query_block * self.key_block)


def block_plan(metadata: TreeMetadata, query_block: int, key_block: int, *, window: int | None = None) -> BlockPlan:
    """The tiles of a micro-batch, built on first use and kept with its metadata. ``window`` in path positions."""
    return metadata.derived(
        f"blocks {query_block}x{key_block} window {window}",
        lambda metadata: _build(metadata, query_block, key_block, window),
    )


def visible_pairs(metadata: TreeMetadata, *, window: int | None = None) -> int:
    """Count visible pairs of queries that are read, one for each token of padding; with a window, those within it."""
    seen = metadata.host_position_ids[metadata.unread :].astype(np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())


def _build(metadata: TreeMetadata, query_block: int, key_block: int, window: int | None) -> BlockPlan:
    bounds = _key_bounds(metadata.host_subtree_end, query_block, key_block, metadata.unread)
    counts = bounds[:, 3] - bounds[:, 0]
    key = np.repeat(np.arange(len(bounds)), counts)
    query = _ranges(bounds[:, 0], bounds[:, 3])
    kind = (query >= np.repeat(bounds[:, 1], counts)).astype(np.int64) + (query >= np.repeat(bounds[:, 2], counts))
    by_key = Tiles(bounds=bounds.astype(np.int32), blocks=None)
    if window is not None:
        reached, covered = _in_window(metadata.host_position_ids, query, key, query_block, key_block, window)
        kind = np.where((kind == _FULL) & ~covered, _TAIL, kind)[reached]
        query, key = query[reached], key[reached]
        by_key = _grouped(key, kind, query, len(bounds))
    return BlockPlan(
        query_block=query_block,
        key_block=key_block,
        by_key=by_key,
        by_query=_grouped(query, kind, key, -(-metadata.padded_size // query_block)),
        visited=len(query),
        visible_pairs=visible_pairs(metadata, window=window),
    )


_FULL, _TAIL = 1, 2


def _key_bounds(end: Int32Array, query_block: int, key_block: int, unread: int) -> Int64Array:
    """Return each key block's range of query blocks and the starts of its full and tail parts, int64 ``[NK, 4]``."""
    size = len(end)
    start = np.arange(0, size, key_block)
    first = np.maximum(start, unread) // query_block
    last = np.maximum(first, -(-np.maximum.reduceat(end, start).astype(np.int64) // query_block))
    # Keys past the end of a ragged last block count here, so that it is diagonal throughout: it is never full.
    diagonal_end = np.clip(-(-(start + key_block - 1) // query_block), first, last)
    # Rows past the last token do not exist: a query block is full if its last existing row is.
    smallest = np.minimum.reduceat(end, start).astype(np.int64)
    full_end = np.where(smallest == size, last, smallest // query_block)
    return np.stack([first, diagonal_end, np.clip(full_end, diagonal_end, last), last], axis=1)


def _in_window(
    position: Int32Array, query: Int64Array, key: Int64Array, query_block: int, key_block: int, window: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return for each tile, int64 ``[n]``, whether any pair can be within the window, and whether all must be."""
    query_start, key_start = (np.arange(0, len(position), block) for block in (query_block, key_block))
    lowest_query, highest_query = (f.reduceat(position, query_start)[query] for f in (np.minimum, np.maximum))
    lowest_key, highest_key = (f.reduceat(position, key_start)[key] for f in (np.minimum, np.maximum))
    return lowest_query - highest_key < window, highest_query - lowest_key < window


def _grouped(row: Int64Array, kind: Int64Array, block: Int64Array, rows: int) -> Tiles:
    """Return tiles, int64 ``[n]``, by row and kind, in the order given, which is ascending in ``block``."""
    key = 3 * row + kind
    # NumPy sorts 16-bit integers by radix, in linear time.
    order = np.argsort(key.astype(np.uint16) if 3 * rows <= 1 << 16 else key, kind="stable")
    ends = np.cumsum(np.bincount(key, minlength=3 * rows)).reshape(rows, 3)
    first = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1, 2]])
    return Tiles(bounds=np.column_stack([first, ends]).astype(np.int32), blocks=block[order].astype(np.int32))


def _ranges(start: npt.NDArray[np.integer], end: npt.NDArray[np.integer]) -> Int64Array:
    """Concatenate the ranges: ``start[0], ..., end[0] - 1, start[1], ...``."""
    counts = (end - start).astype(np.int64)
    ranges: Int64Array = np.arange(counts.sum()) + np.repeat(start - (np.cumsum(counts) - counts), counts)
    return ranges
