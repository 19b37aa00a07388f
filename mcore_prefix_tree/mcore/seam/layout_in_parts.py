"""A layout that runs in parts: what each part reads from others, and what it leaves to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.tree_chunks import (
    ChunkLayout,
    cut,
    find_carried,
    find_handed_on,
    find_in_window,
    find_key_nodes,
    find_last_readers,
    find_last_spans,
    find_stack,
    keep_tokens,
)
from mcore_prefix_tree.mcore.seam.carried_keys import Carry, CarryStore, Passage, SampleCounts, Stack
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.metadata import Handover, TreeMetadata
from mcore_prefix_tree.plan import TreePart
from mcore_prefix_tree.utils.upload import upload

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class LaidOutPart(NamedTuple):
    """A part of a layout, and how it takes part in the exchange with others."""

    layout: ChunkLayout  # the tokens that it runs
    sample_node: Int32Array  # int32 [S], the last node of each sample in it, or -1
    handover: Handover  # the states that it reads and leaves
    carry: Carry  # the keys, values and states that it reads and leaves

    def set_in(self, params: TreePackedSeqParams) -> TreePackedSeqParams:
        """Return the parameters of the part's layout with the exchange."""
        metadata = params.tree_metadata
        assert metadata is not None, "it is made of a layout"
        metadata = replace(metadata, sample_node=self.sample_node, handover=self.handover)
        return replace(params, tree_metadata=metadata, carry=self.carry)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutInParts:
    """A layout above the budget, and the parts that run it."""

    layout: FlatLayout
    chunks: Sequence[TreePart]  # the chunks, in the order of the layout
    carried: Int64Array  # int64 [X], the tokens that chunks read, as indices in layout, in the order of the first pass
    owner: Int64Array  # int64 [X], the chunk of each
    reader: Int64Array  # int64 [X], the last chunk that reads each
    passes: Sequence[TreePart]  # the first passes over them; empty if the chunks themselves run ahead
    # shelf, row: int64 [X], the place of each in the store.
    shelf: Int64Array
    row: Int64Array
    store: CarryStore
    trains: bool  # see Carrying
    loss_tokens: int | None  # tokens over which balancing losses are means; None for those of each part
    windows: tuple[int, ...]  # windows of attention layers, which keep only what parts see through them

    @classmethod
    def of(
        cls,
        layout: FlatLayout,
        runs: Sequence[TreePart],
        *,
        trains: bool,
        loss_tokens: int | None = None,
        windows: Iterable[int | None] = (),
    ) -> LayoutInParts:
        """Return a layout with the parts that run it."""
        chunks = sorted(run for run in runs if run.is_chunk)
        starts = [chunk.start for chunk in chunks]
        carried = find_carried(layout, [*starts, layout.physical_tokens])
        reader = find_last_readers(layout, starts, carried)
        order = np.argsort(-reader, kind="stable")
        carried, reader = carried[order], reader[order]
        owner = np.searchsorted(starts, carried, side="right") - 1
        # A shelf has the tokens of one chunk that one micro-batch keeps.
        passes = [run for run in runs if run.forward_only]
        of_pass = np.searchsorted([run.end for run in passes], np.arange(len(carried)), side="right")
        shelf = owner * (len(passes) + 1) + of_pass
        return cls(
            layout=layout,
            chunks=chunks,
            carried=carried,
            owner=owner,
            reader=reader,
            passes=passes,
            shelf=shelf,
            row=_count_before(shelf),
            store=CarryStore(),
            trains=trains,
            loss_tokens=loss_tokens,
            windows=tuple(sorted({window for window in windows if window is not None})),
        )

    @cached_property
    def above(self) -> FlatLayout:
        """The layout of the carried tokens."""
        return keep_tokens(self.layout, self.carried)

    @cached_property
    def has_state(self) -> npt.NDArray[np.bool_]:
        """bool ``[X]``, whether a part begins with the state of recurrent layers after a carried token."""
        found = np.isin(self.carried, find_handed_on(self.layout, [chunk.start for chunk in self.chunks]))
        if self.passes:
            found[find_handed_on(self.above, [run.start for run in self.passes])] = True
        return found

    @cached_property
    def state_row(self) -> Int64Array:
        """int64 ``[X]``, row in its shelf of the state after each carried token that has one."""
        return _rows_of(self.shelf, self.has_state)

    @cached_property
    def seen(self) -> dict[int, npt.NDArray[np.bool_]]:
        """bool ``[X]`` by window, whether a part sees a carried token through it."""
        found = {window: np.zeros(len(self.carried), dtype=np.bool_) for window in self.windows}
        for part in (*self.chunks, *self.passes) if found else ():
            layout = self.above if part.forward_only else self.layout
            stack = self._places(find_stack(layout, part.start), forward_only=part.forward_only)
            for window, seen in found.items():
                seen[stack[find_in_window(layout, part.start, part.end, len(stack), window)]] = True
        return found

    @cached_property
    def seen_row(self) -> dict[int, Int64Array]:
        """int64 ``[X]`` by window, row in its shelf of each carried token that is seen through it."""
        return {window: _rows_of(self.shelf, seen) for window, seen in self.seen.items()}

    def _places(self, stack: Int64Array, *, forward_only: bool) -> Int64Array:
        """Return the places in ``carried`` of a stack, int64 ``[S]``; a first pass has them already."""
        if forward_only:
            return stack
        return self.by_index[np.searchsorted(self.carried, stack, sorter=self.by_index)]

    @cached_property
    def last(self) -> Int64Array:
        """int64 ``[S]``, the last token of each sample."""
        return self.layout.cu_node_lens[self.layout.sample_node + 1].astype(np.int64) - 1

    @cached_property
    def lengths(self) -> torch.Tensor:
        """fp32 ``[S]``, tokens of each sample."""
        return upload(np.diff(self.layout.cu_sample_lens).astype(np.float32), "cpu")

    @cached_property
    def by_index(self) -> Int64Array:
        """int64 ``[X]``, the order of the carried tokens in ``layout``."""
        return np.argsort(self.carried)

    def lay_out(self, part: TreePart, padded_size: int) -> LaidOutPart:
        """Return a part, padded to ``padded_size`` tokens; a first pass scores nothing."""
        layout = cut(self.above if part.forward_only else self.layout, part.start, part.end, padded_size=padded_size)
        stack = self._places(find_stack(layout.whole, part.start), forward_only=part.forward_only)
        if part.forward_only:
            own = np.arange(part.start, part.end)
            return self._exchanging(layout, stack, own, own - part.start, ((), ()), keeps=True)
        number = self.chunks.index(part)
        own = np.flatnonzero(self.owner == number)
        scored = np.setdiff1d(self.shelf[self.reader == number], self.shelf[self.reader > number])
        # In training the chunk before runs next.
        last = np.unique(self.shelf[self.owner == number - 1]) if self.trains else scored
        forgotten = tuple(last.tolist()), tuple(scored.tolist())
        return self._exchanging(layout, stack, own, self.carried[own] - part.start, forgotten, keeps=not self.trains)

    def _exchanging(
        self,
        layout: ChunkLayout,
        stack: Int64Array,
        own: Int64Array,
        places: Int64Array,
        last: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        keeps: bool,
    ) -> LaidOutPart:
        """Return a part that reads ``stack``, int64 ``[S]`` places in ``carried``, and leaves ``own`` at places."""
        # Both are int64 [n]; for last, of training and of scoring, and keeps see Carry.
        whole = self._stack(layout, stack, own, places, None)
        handover, states = self._handover(layout, stack, own, places)
        sample_node, counts = self._samples(layout, places)
        carry = Carry(
            keys=whole.keys,
            tokens=whole.tokens,
            windows={window: self._stack(layout, stack, own, places, window) for window in self.windows},
            states=states,
            last=last[0],
            last_scored=last[1],
            store=self.store,
            keeps=keeps,
            forgets=not self.trains,
            counts=counts if self.trains else None,
        )
        return LaidOutPart(layout, sample_node, handover, carry)

    def _stack(
        self, layout: ChunkLayout, stack: Int64Array, own: Int64Array, places: Int64Array, window: int | None
    ) -> Stack:
        """Return what attention reads and leaves, with a window or without; see :meth:`_exchanging`."""
        end = layout.start + layout.physical_tokens
        borders, parent = find_key_nodes(layout.whole, layout.start, end)
        row = self.row
        if window is not None:
            seen = find_in_window(layout.whole, layout.start, end, len(stack), window)
            row = self.seen_row[window]
            # What a token sees is a run of its path, so positions relative to it stay.
            behind = borders - len(stack)
            borders = np.append(0, np.cumsum(seen))[np.minimum(borders, len(stack))] + np.maximum(behind, 0)
            stack = stack[seen]
            left = self.seen[window][own]
            own, places = own[left], places[left]
        keys = TreeMetadata.from_nodes(borders, parent, padded_size=len(stack) + layout.padded_size)
        tokens = Passage(_by_shelf(self.shelf[stack], row[stack]), _by_shelf(self.shelf[own], places))
        return Stack(replace(keys, unread=len(stack)), tokens)

    def _handover(
        self, layout: ChunkLayout, stack: Int64Array, own: Int64Array, places: Int64Array
    ) -> tuple[Handover, Passage]:
        """Return the states that come in and are left, and their rows; for arguments see :meth:`_exchanging`."""
        end, tokens = layout.start + layout.physical_tokens, find_stack(layout.whole, layout.start)
        before = layout.whole.predictor[layout.start : end]
        heads = np.flatnonzero((before >= 0) & (before < layout.start))
        read, given = np.unique(before[heads], return_inverse=True)
        from_stack = stack[np.searchsorted(tokens, read)]
        left, at = own[self.has_state[own]], places[self.has_state[own]]
        ends = np.sort(at)
        return Handover(heads=heads, given=given, num_given=len(read), ends=ends), Passage(
            _by_shelf(self.shelf[from_stack], self.state_row[from_stack]),
            _by_shelf(self.shelf[left], np.searchsorted(ends, at)),
        )

    def _samples(self, layout: ChunkLayout, carried: Int64Array) -> tuple[Int32Array, SampleCounts]:
        """Return the last node of each sample in a part, int32 ``[S]``, and its counts; ``carried`` are places."""
        first, is_chunk = layout.start + layout.cu_node_lens[:-1].astype(np.int64), layout.whole is self.layout
        is_counted = (np.arange(layout.padded_size) < layout.physical_tokens).astype(np.float32)
        if self.passes:
            is_counted[carried] = not is_chunk
        first = first if is_chunk else self.carried[first]
        node = find_last_spans(first, self.layout.subtree_end[first].astype(np.int64), self.last)
        is_reached = np.add.reduceat(is_counted, layout.cu_node_lens[:-1]) > 0
        for own, parent in enumerate(layout.node_parent.tolist()):
            is_reached[own] |= parent >= 0 and is_reached[parent]
        return node.astype(np.int32), SampleCounts(
            part=(is_chunk, layout.start),
            is_counted=upload(is_counted, "cpu"),
            samples=upload(np.flatnonzero((node >= 0) & is_reached[node]), "cpu"),
            lengths=self.lengths,
            loss_tokens=self.loss_tokens,
        )


def _rows_of(shelf: Int64Array, some: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the row in its shelf of each of some tokens, int64 ``[X]``; 0 for others."""
    row = np.zeros_like(shelf)
    row[some] = _count_before(shelf[some])
    return row


def _count_before(shelf: Int64Array) -> Int64Array:
    """Return how many before each are on the same shelf, int64 ``[n]``."""
    by_shelf = np.argsort(shelf, kind="stable")
    count = np.empty_like(shelf)
    count[by_shelf] = np.arange(len(shelf)) - np.searchsorted(shelf[by_shelf], shelf[by_shelf])
    return count


def _by_shelf(shelf: Int64Array, values: Int64Array) -> tuple[tuple[int, torch.Tensor], ...]:
    """Return the values of each shelf, both int64 ``[n]``; along a path shelves ascend."""
    return tuple((number, upload(values[shelf == number], "cpu")) for number in np.unique(shelf).tolist())
