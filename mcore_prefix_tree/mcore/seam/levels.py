"""Order of a tree's tokens for recurrent layers: a state goes from the end of a segment into all of its children.

A chunk of a tree above the budget is given the states at the ends of its parents, and keeps those that other chunks
are given.

Legend: P tokens of a micro-batch with padding, G segments that have tokens, W width of a convolution, m given states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan.model_shape import CHUNK
from mcore_prefix_tree.utils.upload import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """n segments with equally many branch points above them: one batch of sequences.

    Those whose last state is kept come first, and the long before the short.
    """

    start: int  # place of its first token in Levels.order
    end: int  # place after its last token
    cu_lens: torch.Tensor  # int64 [n + 1], borders of the segments, from 0
    # int64 [n], each segment's first state among the kept ones of the level above; a root's among the m given ones and
    # one of zeros, of no use if none is given.
    parent: torch.Tensor
    kept: int  # number of segments whose last state is kept, for children or for other micro-batches
    # int64 [c, 2], the segment and the place in it of each chunk of 64 tokens. FLA's rule would compute them from
    # cu_lens, and wait for the device.
    chunks: torch.Tensor
    offsets: torch.Tensor  # int64 [n + 1], number of chunks before each segment, and of all
    lens: Int64Array  # int64 NumPy [n], tokens of each segment


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """The tokens level by level. All padding is one more root.

    The states of a layer are the m given ones and one of zeros for the other roots, if any is given, and then those
    that each level keeps.
    """

    levels: tuple[Level, ...]  # from the roots down
    cu_lens: torch.Tensor  # int64 [G + 1], borders of the segments of all levels; chunks and offsets as a level's
    chunks: torch.Tensor
    offsets: torch.Tensor
    # int64 [G], the state that each segment begins with; one of zeros comes first if none is given.
    first_state: torch.Tensor
    order: torch.Tensor  # int64 [P], flat index of each token
    inverse: torch.Tensor  # int64 [P], place of each flat token in order
    host_order: Int64Array  # the same as a NumPy array
    first: Int64Array  # int64 NumPy [G], place in order of each segment's first token, ascending
    # int64 NumPy [P], place in order of each token's predecessor on its path; P if it has none, and P + 1 + i if it
    # follows given state i.
    above: Int64Array
    state: Int64Array  # int64 NumPy [G], the state that each segment begins with; of no use to roots if none is given
    left: torch.Tensor  # int64 [n], the states that other micro-batches read
    left_at: Int64Array  # int64 NumPy [n], place in order of the last token before each of them
    given: int  # m

    @classmethod
    def of(cls, metadata: TreeMetadata) -> Levels:
        """Return the plan of a micro-batch, on the device of its tensors."""
        starts, ends, parent = _segments_with_tokens(metadata)
        size, device, handover = metadata.padded_size, metadata.subtree_end.device, metadata.handover
        level = np.zeros(len(parent), dtype=np.int64)
        for segment, above in enumerate(parent.tolist()):
            level[segment] = level[above] + 1 if above >= 0 else 0
        given = np.full(len(parent), handover.num_given)
        given[np.searchsorted(starts, handover.heads)] = handover.given
        left = np.searchsorted(ends, handover.ends + 1)
        is_kept = np.zeros(len(parent), dtype=bool)
        is_kept[parent[parent >= 0]] = is_kept[left] = True
        lens = ends - starts
        by_level = np.lexsort((-lens, ~is_kept, level))
        lens = lens[by_level]
        first = np.cumsum(lens) - lens
        order = np.repeat(starts[by_level] - first, lens) + np.arange(size)
        inverse = np.empty(size, dtype=np.int64)
        inverse[order] = np.arange(size)
        predecessor = np.concatenate([[size], np.arange(size - 1)])
        before_root = np.where(given < handover.num_given, size + 1 + given, size)
        predecessor[first] = np.where(parent >= 0, inverse[ends[parent] - 1], before_root)[by_level]
        state = np.empty(len(parent), dtype=np.int64)
        state[by_level] = np.cumsum(is_kept[by_level]) - 1 + (handover.num_given + 1) * (handover.num_given > 0)
        first_state = np.where(parent >= 0, state[parent] + (handover.num_given == 0), given)
        return cls(
            levels=tuple(_levels(by_level, level, lens, parent, given, is_kept, device)),
            cu_lens=upload(np.append(first, size), device),
            chunks=upload(_chunks(lens), device),
            offsets=upload(_offsets(lens), device),
            first_state=upload(first_state[by_level], device),
            order=upload(order, device),
            inverse=upload(inverse, device),
            host_order=order,
            first=first,
            above=predecessor,
            state=np.where(parent >= 0, state[parent], given)[by_level],
            left=upload(state[left], device),
            left_at=inverse[handover.ends],
            given=handover.num_given,
        )


def _segments_with_tokens(metadata: TreeMetadata) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return first token, end and parent of each segment, int64 ``[G]``, parents before children; -1 for a root."""
    segments, tokens, size = metadata.segments, metadata.num_tokens, metadata.padded_size
    real = len(segments.parent) - (size - tokens)
    borders = segments.cu_lens[: real + 1].astype(np.int64)
    filled = np.flatnonzero(np.diff(borders))
    # A segment ends where others read its state, so it may be several, each the parent of the next.
    starts = np.union1d(borders[filled], metadata.handover.ends[metadata.handover.ends < tokens - 1] + 1)
    ends = np.append(starts, tokens)[1:]
    parent = np.arange(len(starts)) - 1
    pieces = np.searchsorted(starts, borders)
    # A segment without tokens hands on the state of its parent.
    nearest: list[int] = []
    for segment, above in enumerate(segments.parent[:real].tolist()):
        above = nearest[above] if above >= 0 else -1
        is_empty = borders[segment] == borders[segment + 1]
        nearest.append(above if is_empty else int(pieces[segment + 1]) - 1)
        if not is_empty:
            parent[pieces[segment]] = above
    if tokens < size:
        starts, ends, parent = np.append(starts, tokens), np.append(ends, size), np.append(parent, -1)
    return starts, ends, parent


def _levels(
    by_level: Int64Array,
    level: Int64Array,
    lens: Int64Array,
    parent: Int64Array,
    given: Int64Array,
    is_kept: npt.NDArray[np.bool_],
    device: torch.device,
) -> list[Level]:
    """Return the levels of segments that are sorted by level; ``lens`` are in that order, the others are not."""
    sizes = np.bincount(level)
    # A segment's place among those of its level.
    place = np.empty(len(level), dtype=np.int64)
    place[by_level] = np.arange(len(level)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    above = np.where(parent >= 0, place[parent], given)
    made, token, segment = [], 0, 0
    for size in sizes.tolist():
        chosen, own = by_level[segment : segment + size], lens[segment : segment + size]
        end = token + int(own.sum())
        made.append(
            Level(
                start=token,
                end=end,
                cu_lens=upload(np.concatenate([[0], np.cumsum(own)]), device),
                parent=upload(above[chosen], device),
                kept=int(is_kept[chosen].sum()),
                chunks=upload(_chunks(own), device),
                offsets=upload(_offsets(own), device),
                lens=own,
            )
        )
        token, segment = end, segment + size
    return made


def _offsets(lens: Int64Array) -> Int64Array:
    return np.append(0, np.cumsum(-(-lens // CHUNK)))


def _chunks(lens: Int64Array) -> Int64Array:
    first = _offsets(lens)
    segment = np.repeat(np.arange(len(lens)), np.diff(first))
    return np.column_stack([segment, np.arange(first[-1]) - first[segment]])


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRows:
    """One row of tokens in which each segment follows the W - 1 tokens before it on its path.

    A causal convolution of the row is that of every path, at the segments' own tokens. Behind P flat tokens come zeros,
    and then the W - 1 tokens before each given state: the last one of each, the one before it, and so on.
    """

    tokens: torch.Tensor  # int64 [P + G * (W - 1)], index of each of the row's tokens, P for the zeros before a root
    own: torch.Tensor  # int64 [P], where the row has the tokens of Levels.order
    left: torch.Tensor  # int64 [n, W - 1], indices of the tokens before each state that other micro-batches read

    @classmethod
    def of(cls, metadata: TreeMetadata, width: int) -> PathRows:
        """Return the row for a convolution of a width."""
        levels = metadata.derived("levels", Levels.of)
        size, device = metadata.padded_size, metadata.subtree_end.device
        own = np.arange(size)
        own += (width - 1) * np.searchsorted(levels.first, own, side="right")
        tails = size + 1 + np.arange(levels.given * (width - 1))
        above = np.concatenate([levels.above, [size], tails[levels.given :], np.full(levels.given, size)])
        index = np.concatenate([levels.host_order, [size], tails])
        rows = np.empty(size + len(levels.first) * (width - 1), dtype=np.int64)
        rows[own] = np.arange(size)
        left = np.empty((len(levels.left_at), width - 1), dtype=np.int64)
        at, left_at = levels.first, levels.left_at
        for distance in range(1, width):
            at = above[at]
            rows[own[levels.first] - distance] = at
            left[:, distance - 1] = left_at
            left_at = above[left_at]
        return cls(tokens=upload(index[rows], device), own=upload(own, device), left=upload(index[left], device))


def convolve_paths(
    x: torch.Tensor,
    tree: TreePackedSeqParams,
    layer: object,
    width: int,
    convolve: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the causal convolution of a layer's flat tokens ``[P, D]`` along their paths, ``[1, P, D]`` by level.

    ``convolve`` does that of a row ``[1, tokens, D]``.
    """
    metadata, which = tree.tree_metadata, (layer, "tokens before a state")
    assert metadata is not None
    rows = metadata.derived(f"rows for a convolution of {width}", lambda tree: PathRows.of(tree, width))
    table = F.pad(x, (0, 0, 0, 1))
    if tree.carry is not None and (tails := tree.carry.read_states(which, x)) is not None:
        table = torch.cat([table, tails.transpose(0, 1).flatten(0, 1)])
    # Gradients of a repeated row: indexing adds them in one order on a GPU, index_select in any.
    convolved = convolve(table[rows.tokens].unsqueeze(0)).index_select(1, rows.own)
    return convolved if tree.carry is None else tree.carry.leave_states(which, convolved, table[rows.left])


def read_states(tree: TreePackedSeqParams, layer: object, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the given states of a layer and one of zeros, ``[m + 1, heads, ..., ...]``; nothing if none is given.

    ``inputs`` are the tensors that the layer makes its states of.
    """
    given = None if tree.carry is None else tree.carry.read_states((layer, "state"), *inputs)
    return [] if given is None else [F.pad(given, (0, 0) * (given.ndim - 1) + (0, 1))]


def leave_states(
    tree: TreePackedSeqParams, layer: object, out: torch.Tensor, states: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Leave those of a layer's states, ``[n, ...]`` each, that other micro-batches read; return its output."""
    if tree.carry is None or not tree.carry.states.left:
        return out
    assert tree.tree_metadata is not None
    left = tree.tree_metadata.derived("levels", Levels.of).left
    return tree.carry.leave_states((layer, "state"), out, torch.cat([*states])[left])


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """m runs of tokens as sequences of one length L."""

    tokens: torch.Tensor  # int64 [m * L], place of each token; after a run's end, that of its last token
    is_token: torch.Tensor  # bool [m, L]
    own: torch.Tensor  # int64, places in tokens of the runs' own tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedLevels:
    """The levels for a rule that has no sequences in one row; the longest of a batch is at most twice the shortest."""

    # For each level, batches of segments that follow each other; places are those in the level.
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
    """One run of tokens for each of some states, in batches."""

    batches: tuple[Padded, ...]  # the runs, long before short; places are those in Levels.order
    points: tuple[torch.Tensor, ...]  # for each batch int64 [m], the states of its runs


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchPoints:
    """The K states of a layer, for products that are grouped by state."""

    segment: torch.Tensor  # int32 [P], segment of each token of Levels.order, ascending
    first: torch.Tensor  # int64 [G], place of each segment's first token
    last: torch.Tensor  # int64 [k], place of the last token before each of the states that levels keep
    own: Runs  # the tokens of the segments that end with these states
    row: torch.Tensor  # int64 [k], where the batches of own have each of these states
    below: Runs  # the tokens of all segments that begin with a state
    start: int  # place of the first of them
    slot: torch.Tensor  # int64, where the batches of below have each of them, in the order of the levels

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
        # Tokens by the state that they begin with.
        skipped = 0 if levels.given else len(levels.levels[0].lens)
        tokens = np.bincount(levels.state[skipped:], lens[skipped:]).astype(np.int64)
        start = int(lens[:skipped].sum())
        by_state = start + np.argsort(np.repeat(levels.state, lens)[start:], kind="stable")
        own, row, _ = _runs(
            np.flatnonzero(np.isin(segment, segments)), np.arange(len(segments)), lens[segments], device
        )
        begins = np.flatnonzero(tokens)
        below, _, slot = _runs(by_state, begins, tokens[begins], device)
        return cls(
            segment=upload(segment.astype(np.int32), device),
            first=upload(first, device),
            last=upload(first[segments] + lens[segments] - 1, device),
            own=own,
            row=upload(row, device),
            below=below,
            start=start,
            slot=upload(slot, device),
        )


def _runs(
    places: Int64Array, points: Int64Array, lens: Int64Array, device: torch.device
) -> tuple[Runs, Int64Array, Int64Array]:
    """Return the runs of ``places``, where the batches have each run, and each place from the least up."""
    by_length = np.argsort(-lens, kind="stable")
    starts, ordered = np.cumsum(lens) - lens, lens[by_length]
    within = np.arange(len(places)) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    places = places[np.repeat(starts[by_length], ordered) + within]
    batches = _padded(places, ordered, device, unit=1)
    sizes = [tuple(batch.is_token.shape) for batch in batches]
    widths = np.repeat([width for _, width in sizes], [runs for runs, _ in sizes]).astype(np.int64)
    slots = np.repeat(np.cumsum(widths) - widths, ordered) + within
    of_batches = torch.split(upload(points[by_length], device), [runs for runs, _ in sizes])
    return Runs(batches=tuple(batches), points=of_batches), np.argsort(by_length), slots[np.argsort(places)]
