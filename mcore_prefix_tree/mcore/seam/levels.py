"""Order of a tree's tokens for recurrent layers: a state goes from the end of a segment into all of its children.

Legend: P tokens of a micro-batch with padding, G segments that have tokens, W width of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan.model_shape import CHUNK
from mcore_prefix_tree.utils.upload import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """n segments with equally many branch points above them: one batch of sequences.

    Those with children come first, and the long before the short.

    Attributes:
        start: place of its first token in :attr:`Levels.order`.
        end: place after its last token.
        cu_lens: int64 ``[n + 1]``, borders of the segments, from 0.
        parent: int64 ``[n]``, each segment's parent among the kept states of the level above; of no use to roots.
        kept: number of segments with children, whose last state is kept.
        chunks: int64 ``[c, 2]``, the segment and the place in it of each chunk of 64 tokens. FLA's rule would compute
            them from ``cu_lens``, and wait for the device.
        lens: int64 NumPy ``[n]``, tokens of each segment.
    """

    start: int
    end: int
    cu_lens: torch.Tensor
    parent: torch.Tensor
    kept: int
    chunks: torch.Tensor
    lens: Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """The tokens level by level. All padding is one more root.

    Attributes:
        levels: from the roots down.
        order: int64 ``[P]``, flat index of each token.
        inverse: int64 ``[P]``, place of each flat token in ``order``.
        host_order: the same as a NumPy array.
        first: int64 NumPy ``[G]``, place in ``order`` of each segment's first token, ascending.
        above: int64 NumPy ``[P]``, place in ``order`` of each token's predecessor on its path; P if it has none.
    """

    levels: tuple[Level, ...]
    order: torch.Tensor
    inverse: torch.Tensor
    host_order: Int64Array
    first: Int64Array
    above: Int64Array

    @classmethod
    def of(cls, metadata: TreeMetadata) -> Levels:
        """Return the plan of a micro-batch, on the device of its tensors."""
        starts, ends, parent = _segments_with_tokens(metadata)
        size, device = metadata.padded_size, metadata.subtree_end.device
        level = np.zeros(len(parent), dtype=np.int64)
        for segment, above in enumerate(parent.tolist()):
            level[segment] = level[above] + 1 if above >= 0 else 0
        has_children = np.zeros(len(parent), dtype=bool)
        has_children[parent[parent >= 0]] = True
        lens = ends - starts
        by_level = np.lexsort((-lens, ~has_children, level))
        lens = lens[by_level]
        first = np.cumsum(lens) - lens
        order = np.repeat(starts[by_level] - first, lens) + np.arange(size)
        inverse = np.empty(size, dtype=np.int64)
        inverse[order] = np.arange(size)
        predecessor = np.concatenate([[size], np.arange(size - 1)])
        last = inverse[ends[parent] - 1]
        predecessor[first] = np.where(parent >= 0, last, size)[by_level]
        return cls(
            levels=tuple(_levels(by_level, level, lens, parent, has_children, device)),
            order=upload(order, device),
            inverse=upload(inverse, device),
            host_order=order,
            first=first,
            above=predecessor,
        )


def _segments_with_tokens(metadata: TreeMetadata) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return first token, end and parent of each segment, int64 ``[G]``, parents before children; -1 for a root."""
    segments, tokens, size = metadata.segments, metadata.num_tokens, metadata.padded_size
    real = len(segments.parent) - (size - tokens)
    borders = segments.cu_lens[: real + 1].astype(np.int64)
    renumbered = np.cumsum(np.diff(borders) > 0) - 1
    # A segment without tokens hands on the state of its parent.
    nearest: list[int] = []
    parent: list[int] = []
    for segment, above in enumerate(segments.parent[:real].tolist()):
        above = nearest[above] if above >= 0 else -1
        is_empty = borders[segment] == borders[segment + 1]
        nearest.append(above if is_empty else int(renumbered[segment]))
        if not is_empty:
            parent.append(above)
    filled = np.flatnonzero(np.diff(borders))
    starts, ends = borders[filled], borders[filled + 1]
    if tokens < size:
        starts, ends, parent = np.append(starts, tokens), np.append(ends, size), [*parent, -1]
    return starts, ends, np.array(parent, dtype=np.int64)


def _levels(
    by_level: Int64Array,
    level: Int64Array,
    lens: Int64Array,
    parent: Int64Array,
    has_children: npt.NDArray[np.bool_],
    device: torch.device,
) -> list[Level]:
    """Return the levels of segments that are sorted by level; ``lens`` are in that order, the others are not."""
    sizes = np.bincount(level)
    # A segment's place among those of its level.
    place = np.empty(len(level), dtype=np.int64)
    place[by_level] = np.arange(len(level)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    made, token, segment = [], 0, 0
    for size in sizes.tolist():
        chosen, own = by_level[segment : segment + size], lens[segment : segment + size]
        end = token + int(own.sum())
        made.append(
            Level(
                start=token,
                end=end,
                cu_lens=upload(np.concatenate([[0], np.cumsum(own)]), device),
                parent=upload(place[np.maximum(parent[chosen], 0)], device),
                kept=int(has_children[chosen].sum()),
                chunks=upload(_chunks(own), device),
                lens=own,
            )
        )
        token, segment = end, segment + size
    return made


def _chunks(lens: Int64Array) -> Int64Array:
    counts = -(-lens // CHUNK)
    first = np.cumsum(counts) - counts
    return np.column_stack(
        [np.repeat(np.arange(len(lens)), counts), np.arange(counts.sum()) - np.repeat(first, counts)]
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRows:
    """One row of tokens in which each segment follows the W - 1 tokens before it on its path.

    A causal convolution of the row is that of every path, at the segments' own tokens.

    Attributes:
        tokens: int64 ``[P + G * (W - 1)]``, flat index of each token, P for the zeros before a root.
        own: int64 ``[P]``, where the row has the tokens of :attr:`Levels.order`.
    """

    tokens: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of(cls, metadata: TreeMetadata, width: int) -> PathRows:
        """Return the row for a convolution of a width."""
        levels = metadata.derived("levels", Levels.of)
        size, device = metadata.padded_size, metadata.subtree_end.device
        own = np.arange(size)
        own += (width - 1) * np.searchsorted(levels.first, own, side="right")
        rows = np.empty(size + len(levels.first) * (width - 1), dtype=np.int64)
        rows[own] = np.arange(size)
        above, at = np.append(levels.above, size), levels.first
        for distance in range(1, width):
            at = above[at]
            rows[own[levels.first] - distance] = at
        return cls(tokens=upload(np.append(levels.host_order, size)[rows], device), own=upload(own, device))


def convolve_paths(
    x: torch.Tensor, metadata: TreeMetadata, width: int, convolve: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the causal convolution of flat tokens ``[P, D]`` along their paths, ``[1, P, D]`` by level.

    ``convolve`` does that of a row ``[1, tokens, D]``.
    """
    rows = metadata.derived(f"rows for a convolution of {width}", lambda tree: PathRows.of(tree, width))
    # Gradients of a repeated row: indexing adds them in one order on a GPU, index_select in any.
    row = F.pad(x, (0, 0, 0, 1))[rows.tokens].unsqueeze(0)
    return convolve(row).index_select(1, rows.own)


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """m runs of tokens as sequences of one length L.

    Attributes:
        tokens: int64 ``[m * L]``, place of each token; after a run's end, that of its last token.
        is_token: bool ``[m, L]``.
        own: int64, places in ``tokens`` of the runs' own tokens.
    """

    tokens: torch.Tensor
    is_token: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedLevels:
    """The levels for a rule that has no sequences in one row; the longest of a batch is at most twice the shortest.

    Attributes:
        levels: for each level, batches of segments that follow each other; places are those in the level.
    """

    levels: tuple[tuple[Padded, ...], ...]

    @classmethod
    def of(cls, metadata: TreeMetadata) -> PaddedLevels:
        """Return the batches of a micro-batch."""
        device = metadata.subtree_end.device
        levels = metadata.derived("levels", Levels.of).levels
        return cls(levels=tuple(tuple(_padded(np.arange(level.lens.sum()), level.lens, device)) for level in levels))


def _padded(places: Int64Array, lens: Int64Array, device: torch.device, unit: int = CHUNK) -> list[Padded]:
    """Return the batches of runs of ``places``; those of one batch have equally many units, but for a factor of two."""
    doublings = np.ceil(np.log2(-(-lens // unit))).astype(np.int64)
    made, starts = [], np.cumsum(lens) - lens
    batches = np.split(np.arange(len(lens)), np.flatnonzero(np.diff(doublings)) + 1) if len(lens) else []
    for batch in batches:
        place = np.arange(lens[batch].max())
        tokens = starts[batch, None] + np.minimum(place, lens[batch, None] - 1)
        is_token = place < lens[batch, None]
        made.append(
            Padded(
                tokens=upload(places[tokens.ravel()], device),
                is_token=upload(is_token, device),
                own=upload(np.flatnonzero(is_token), device),
            )
        )
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """One run of tokens for each branch point, in batches.

    Attributes:
        batches: the runs, long before short; places are those in :attr:`Levels.order`.
        points: for each batch int64 ``[m]``, the branch points of its runs.
    """

    batches: tuple[Padded, ...]
    points: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchPoints:
    """The K segments with children, level by level, for products that are grouped by branch point.

    Attributes:
        segment: int32 ``[P]``, segment of each token of :attr:`Levels.order`, ascending.
        first: int64 ``[G]``, place of each segment's first token.
        last: int64 ``[K]``, place of each branch point's last token.
        own: the tokens of the branch points.
        row: int64 ``[K]``, where the batches of ``own`` have each branch point.
        below: the tokens of all children of a branch point.
        slot: int64, where the batches of ``below`` have each token that is not in a root, in the order of the levels.
    """

    segment: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    own: Runs
    row: torch.Tensor
    below: Runs
    slot: torch.Tensor

    @classmethod
    def of(cls, metadata: TreeMetadata) -> BranchPoints:
        """Return the plan of a micro-batch, on the device of its tensors."""
        levels, device = metadata.derived("levels", Levels.of), metadata.subtree_end.device
        first = levels.first
        lens = np.concatenate([level.lens for level in levels.levels])
        begun = np.cumsum([0, *(len(level.lens) for level in levels.levels)])
        kept = [start + np.arange(level.kept) for start, level in zip(begun[:-1], levels.levels, strict=True)]
        segments = np.concatenate(kept)
        segment = np.repeat(np.arange(len(lens)), lens)
        roots = levels.levels[0].end
        # The branch point above a segment is that of its first token's predecessor.
        point = np.searchsorted(segments, segment[levels.above[first[begun[1] :]]])
        # Tokens below the roots, by the branch point above them.
        by_point = roots + np.argsort(np.repeat(point, lens[begun[1] :]), kind="stable")
        own, row, _ = _runs(np.flatnonzero(np.isin(segment, segments)), lens[segments], device)
        below, _, slot = _runs(by_point, np.bincount(point, lens[begun[1] :]).astype(np.int64), device)
        return cls(
            segment=upload(segment.astype(np.int32), device),
            first=upload(first, device),
            last=upload(first[segments] + lens[segments] - 1, device),
            own=own,
            row=upload(row, device),
            below=below,
            slot=upload(slot, device),
        )


def _runs(places: Int64Array, lens: Int64Array, device: torch.device) -> tuple[Runs, Int64Array, Int64Array]:
    """Return the runs of ``places``, where the batches have each run, and each place from the least up."""
    by_length = np.argsort(-lens, kind="stable")
    starts, ordered = np.cumsum(lens) - lens, lens[by_length]
    within = np.arange(len(places)) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    places = places[np.repeat(starts[by_length], ordered) + within]
    batches = _padded(places, ordered, device, unit=1)
    sizes = [tuple(batch.is_token.shape) for batch in batches]
    widths = np.repeat([width for _, width in sizes], [runs for runs, _ in sizes]).astype(np.int64)
    slots = np.repeat(np.cumsum(widths) - widths, ordered) + within
    points = torch.split(upload(by_length, device), [runs for runs, _ in sizes])
    return Runs(batches=tuple(batches), points=points), np.argsort(by_length), slots[np.argsort(places)]
