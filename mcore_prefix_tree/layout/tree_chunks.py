"""Chunks of a layout that is too large for one micro-batch: ranges of its tokens, which read others before them.

What a chunk ``start:end`` reads of the tokens before it is its *stack*: ``{j < start: subtree_end[j] > start}``, the
path to token ``start``. With ``[stack; own tokens]`` as keys, the rule of :class:`FlatLayout` still decides who sees
whom. The *carried* tokens are those of all stacks: with a token its ancestors, so they are a layout by themselves.

Legend: T tokens of a chunk, P its padded size, X tokens of later chunks that a token here predicts, M kept edges, N
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout.flat import FlatLayout, sum_masks
from mcore_prefix_tree.layout.forest import Int32Array, Int64Array
from mcore_prefix_tree.layout.kept_sets import spans
from mcore_prefix_tree.sample import INT32_MAX, Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLayout(FlatLayout):
    """The tokens ``start:start + T`` of a layout of whole samples.

    Arrays of tokens and nodes are cut and shifted; those of samples are the whole layout's. A token is scored with its
    predictor: the score of the x-th token of a later chunk stands at place P + x, and a token that an earlier chunk
    predicts has no place here. Kept edges have theirs behind, at P + X + m.

    Attributes:
        whole: the layout of all chunks.
        start: index of the first token in ``whole``.
        later: int64 ``[X]``, indices in ``whole`` of the tokens of later chunks that are scored here.
    """

    whole: FlatLayout
    start: int
    later: Int64Array

    @property
    def num_places(self) -> int:
        """P + X + M, the number of scores."""
        return self.padded_size + len(self.later) + (0 if self.kept is None else len(self.kept))

    @property
    def edge_predictor(self) -> Int32Array:
        of_later = self.whole.predictor[self.later] - np.int32(self.start)
        return np.concatenate([self.predictor, of_later], dtype=np.int32)

    @property
    def edge_token_id(self) -> Int32Array:
        return np.concatenate([self.input_ids, self.whole.input_ids[self.later]], dtype=np.int32)

    @property
    def depth_edge_weight(self) -> npt.NDArray[np.float64]:
        """``depth_weight`` of the tree by place, ``[K, P + X]``; that of a chunk is empty."""
        weights, count = self.whole.depth_weight, self.physical_tokens
        own = np.where(self.predictor[:count] >= 0, weights[:, self.start : self.start + count], 0.0)
        return np.hstack([np.pad(own, ((0, 0), (0, self.padded_size - count))), weights[:, self.later]])

    @property
    def edge_weight(self) -> npt.NDArray[np.float64]:
        if self.kept is not None:
            return super().edge_weight
        return np.append(self.loss_weight, self.whole.loss_weight[self.later])

    @property
    def has_edge(self) -> npt.NDArray[np.bool_]:
        return self.edge_predictor >= 0 if self.kept is None else super().has_edge

    @property
    def counts_samples(self) -> bool:
        return self.start == 0

    @property
    def scored_places(self) -> tuple[Int64Array, Int64Array]:
        """The places of the scores here, and those of the same tokens in ``whole``, int64 ``[n]`` each."""
        scored = np.flatnonzero(self.predictor >= 0)
        later = self.padded_size + np.arange(len(self.later))
        own, whole = self.kept_places
        return np.concatenate([scored, later, own]), np.concatenate([self.start + scored, self.later, whole])

    @property
    def kept_places(self) -> tuple[Int64Array, Int64Array]:
        """The places of the scores of kept edges here and in ``whole``, int64 ``[M]`` each."""
        if self.kept is None or self.whole.kept is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        behind = self.padded_size + len(self.later)
        edges = self.whole.kept.edges_of(self.start, self.start + self.physical_tokens)
        return np.arange(behind, behind + len(edges)), self.whole.padded_size + edges

    @property
    def token_places(self) -> tuple[Int64Array, Int64Array]:
        """The indices of the tokens here and in ``whole``, int64 ``[T]`` each."""
        here = np.arange(self.physical_tokens)
        return here, self.start + here

    def find_scores(self, place: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Find the scores of this chunk among those of samples.

        Args:
            place: int64 ``[K]``, ascending: the places of the samples' scores in ``whole``.

        Returns:
            The indices in ``place`` of those that are scored here, and their places here, int64 ``[n]`` each.
        """
        here, whole = self.scored_places
        first, behind = np.searchsorted(place, whole), np.searchsorted(place, whole, side="right")
        return spans(first, behind - first), np.repeat(here, behind - first)

    @property
    def sample_map(self) -> Int32Array:
        raise AttributeError("a chunk has parts of samples; see the sample_map of its whole layout")

    @property
    def last_tokens(self) -> Int64Array:
        """Index here of each sample's last token, int64 ``[S]``; -1 for a token of another chunk."""
        own = self.whole.last_tokens - self.start
        return np.where((own >= 0) & (own < self.physical_tokens), own, -1)


def whole_layouts(layouts: Sequence[FlatLayout]) -> list[FlatLayout]:
    """Return layouts with that of their tree in place of chunks, once however many chunks it has."""
    whole = [layout.whole if isinstance(layout, ChunkLayout) else layout for layout in layouts]
    return list({id(layout): layout for layout in whole}.values())


def join_scores(
    layouts: Sequence[FlatLayout], values: Sequence[npt.NDArray[Any]], *, of_edges: bool = True
) -> npt.NDArray[Any]:
    """Return the values of a tree from those of its chunks, ``[P + X + M]``; without ``of_edges`` of tokens, ``[P]``.

    The result is ``[P + M]``, or ``[P]``, of the whole layout; 0 where no chunk has a value. Values can be arrays.
    """
    chunks = [layout for layout in layouts if isinstance(layout, ChunkLayout)]
    whole_layout = chunks[0].whole
    size = whole_layout.num_places if of_edges else whole_layout.padded_size
    joined = np.zeros((size, *values[0].shape[1:]), dtype=values[0].dtype)
    for chunk, own in zip(chunks, values, strict=True):
        here, whole = chunk.scored_places if of_edges else chunk.token_places
        joined[whole] = own[here]
    return joined


def cut(whole: FlatLayout, start: int, end: int, *, padded_size: int, num_supervised: int = 0) -> ChunkLayout:
    """Return the chunk ``start:end`` of a layout; its ``num_supervised`` is the caller's."""
    own, padding = slice(start, end), padded_size - (end - start)
    nodes = _nodes(whole, start, end)
    predictor = whole.predictor[own] - np.int32(start)
    predictor[predictor < 0] = -1
    heads, before = whole.heads
    later = heads[slice(*np.searchsorted(before, (start, end)))]
    later = np.sort(later[later > end])
    if end < whole.physical_tokens and whole.predictor[end] >= start:
        later = np.append(end, later)
    parent, routes = whole.node_parent[nodes] - np.int32(nodes.start), None
    if whole.routes is not None:
        routes = np.full((padded_size, *whole.routes.shape[1:]), -1, dtype=whole.routes.dtype)
        routes[: end - start] = whole.routes[own]
    scored = np.pad(np.where(predictor < 0, -1, np.arange(start, end)), (0, padding), constant_values=-1)
    depth = whole.node_depth[nodes].copy()
    if len(depth):
        depth[0] += start - whole.cu_node_lens[nodes.start]
    return ChunkLayout(
        input_ids=np.pad(whole.input_ids[own], (0, padding)),
        position_ids=np.pad(whole.position_ids[own], (0, padding)),
        subtree_end=np.append(
            np.minimum(whole.subtree_end[own], end) - np.int32(start),
            np.arange(end - start, padded_size, dtype=np.int32) + np.int32(1),
        ),
        predictor=np.pad(predictor, (0, padding), constant_values=-1),
        loss_weight=np.pad(np.where(predictor >= 0, whole.loss_weight[own], 0.0), (0, padding)),
        cu_node_lens=whole.cu_node_lens[nodes.start : nodes.stop + 1].clip(start, end) - np.int32(start),
        node_parent=np.maximum(parent, -1),
        node_depth=depth,
        cu_sample_lens=whole.cu_sample_lens,
        sample_node=whole.sample_node,
        sample_order=whole.sample_order,
        sample_shared=whole.sample_shared,
        num_supervised=num_supervised,
        temperature=None
        if whole.temperature is None
        else np.pad(whole.temperature[own], (0, padding), constant_values=1.0),
        routes=routes,
        whole=whole,
        start=start,
        later=later,
        kept=None if whole.kept is None else whole.kept.cut(start, end, np.append(scored, later)),
    )


def find_stack(layout: FlatLayout, start: int) -> Int64Array:
    """Return the tokens before ``start`` that a chunk from there reads, int64 ``[n]``, ascending: the path to it."""
    nodes = _path(layout, start)
    starts = layout.cu_node_lens[nodes].astype(np.int64)
    lens = np.minimum(layout.cu_node_lens[nodes + 1], start) - starts
    stack: Int64Array = np.arange(lens.sum()) + np.repeat(starts - (np.cumsum(lens) - lens), lens)
    return stack


def find_in_window(layout: FlatLayout, start: int, end: int, size: int, window: int) -> npt.NDArray[np.bool_]:
    """Return which of the ``size`` tokens of its stack a chunk ``start:end`` sees through a window, bool ``[size]``.

    The stack is a path, whose n-th token has position n. Below a head, a token of the chunk whose predecessor is in the
    stack, no token sees more of it than the head does.
    """
    before = layout.predictor[start:end]
    head = layout.position_ids[start:end][(before >= 0) & (before < start)].astype(np.int64)
    change = np.zeros(size + 1, dtype=np.int64)
    np.add.at(change, np.maximum(head - window + 1, 0), 1)
    np.add.at(change, head, -1)
    return np.cumsum(change[:-1]) > 0


def find_carried(layout: FlatLayout, borders: Sequence[int]) -> Int64Array:
    """Return the tokens that a later chunk reads, int64 ``[n]``, ascending; chunks are from border to border."""
    stacks = [find_stack(layout, start) for start in borders[1:-1]]
    return np.unique(np.concatenate(stacks)) if stacks else np.empty(0, dtype=np.int64)


def find_handed_on(layout: FlatLayout, starts: Sequence[int]) -> Int64Array:
    """Return the tokens behind which another part goes on than their own, int64 ``[n]``; parts begin at ``starts``."""
    before = layout.predictor[: layout.physical_tokens].astype(np.int64)
    part = np.searchsorted(starts, np.arange(len(before)), side="right")
    return np.unique(before[(before >= 0) & (part[before] != part)])


def find_last_readers(layout: FlatLayout, starts: Sequence[int], tokens: Int64Array) -> Int64Array:
    """Return the last of the chunks from ``starts`` whose stack has each of ``tokens``, both int64 ``[n]``."""
    last: Int64Array = np.searchsorted(starts, layout.subtree_end[tokens]) - 1
    return last


def keep_tokens(layout: FlatLayout, tokens: Int64Array) -> FlatLayout:
    """Return the layout of some tokens, int64 ``[n]``, with all their ancestors, in another depth-first order.

    No sample is in it.
    """
    none, index = np.empty(0, dtype=np.int64), np.arange(len(tokens))
    places = np.full(layout.padded_size + 1, -1)
    places[tokens] = index
    predictor = places[layout.predictor[tokens]]  # that of -1 is -1
    # A node ends before another child of its last token's, behind a token with two, and where samples end.
    branches, of_whole = np.flatnonzero(predictor != index - 1), np.searchsorted(layout.cu_node_lens, tokens, "right")
    others = np.flatnonzero(of_whole[1:] != of_whole[:-1]) + 1
    starts = np.unique(np.concatenate([index[:1], branches, predictor[branches] + 1, others]))
    starts = starts[starts < len(tokens)]
    borders = np.append(starts, len(tokens)).astype(np.int32)
    parent, ends = np.searchsorted(starts, predictor[starts], side="right") - 1, borders[1:].copy()
    for node in range(len(starts) - 1, 0, -1):
        if parent[node] >= 0:
            ends[parent[node]] = max(ends[parent[node]], ends[node])
    return replace(
        layout,
        input_ids=layout.input_ids[tokens],
        position_ids=layout.position_ids[tokens],
        subtree_end=np.repeat(ends, np.diff(borders)),
        predictor=predictor.astype(np.int32),
        loss_weight=np.zeros(len(tokens)),
        cu_node_lens=borders,
        node_parent=parent.astype(np.int32),
        node_depth=layout.position_ids[tokens][starts],
        cu_sample_lens=np.zeros(1, dtype=np.int64),
        sample_node=none.astype(np.int32),
        sample_order=none,
        sample_shared=none,
        num_supervised=0,
        kept=None,
        depth_weight=np.zeros((len(layout.depth_weight), len(tokens))),
        temperature=None if layout.temperature is None else layout.temperature[tokens],
        routes=None if layout.routes is None else layout.routes[tokens],
    )


def find_last_spans(start: Int64Array, end: Int64Array, tokens: Int64Array) -> Int64Array:
    """Return the innermost of nested spans, both int64 ``[n]``, around each token, int64 ``[S]``; -1 without one."""
    borders, inner, around = [-1], [-1], [-1]  # the innermost span from each border on, and those around the last one
    first, last = [*start.tolist(), INT32_MAX], end.tolist()
    for span in [*np.argsort(start, kind="stable").tolist(), len(last)]:
        while len(around) > 1 and last[around[-1]] <= first[span]:
            borders.append(last[around.pop()])
            inner.append(around[-1])
        borders.append(first[span])
        inner.append(span)
        around.append(span)
    return np.array(inner)[np.searchsorted(borders, tokens, side="right") - 1]


def find_key_nodes(layout: FlatLayout, start: int, end: int) -> tuple[Int64Array, Int64Array]:
    """Return the forest that the chunk ``start:end`` attends to: its stack, then its own tokens.

    Returns:
        int64 ``[N + 1]`` and ``[N]``, the arguments of ``TreeMetadata.from_nodes``.
    """
    nodes = _nodes(layout, start, end)
    borders = layout.cu_node_lens
    above = _path(layout, start)
    lens = np.concatenate(
        [
            np.minimum(borders[above + 1], start) - borders[above],
            np.diff(borders[nodes.start : nodes.stop + 1].clip(start, end)),
        ]
    )
    parent = layout.node_parent[nodes].astype(np.int64)
    outside = parent < nodes.start
    on_path = np.where(parent < 0, -1, np.searchsorted(above, parent))
    parent = np.where(outside, on_path, parent - nodes.start + len(above))
    parent[0] = len(above) - 1
    return np.append(0, np.cumsum(lens)), np.concatenate([np.arange(len(above)) - 1, parent])


def count_supervised(samples: Sequence[Sample], layout: FlatLayout) -> Int64Array:
    """Return int64 ``[P]``: how many tokens of samples with a loss mask each token predicts."""
    lengths, size = np.diff(layout.cu_sample_lens), layout.padded_size
    masks = [sample.loss_mask != 0 for sample in samples]
    times, _ = sum_masks(masks, layout.sample_order, layout.sample_shared, lengths, size)
    scored = np.flatnonzero(times)
    return np.bincount(layout.predictor[scored], times[scored], minlength=size).astype(np.int64)


def _path(layout: FlatLayout, start: int) -> Int64Array:
    """Return the nodes of the stack of a chunk from ``start``, int64 ``[n]``, ascending."""
    path: list[int] = []
    if start < layout.physical_tokens:
        node = _nodes(layout, start, start + 1).start
        node = node if layout.cu_node_lens[node] < start else int(layout.node_parent[node])
        while node >= 0:
            path.append(node)
            node = int(layout.node_parent[node])
    return np.array(path[::-1], dtype=np.int64)


def _nodes(layout: FlatLayout, start: int, end: int) -> slice:
    """Return the nodes with tokens in ``start:end``; the first may begin before."""
    first = int(np.searchsorted(layout.cu_node_lens[:-1], start, side="right")) - 1
    return slice(first, int(np.searchsorted(layout.cu_node_lens[:-1], end, side="left")))
