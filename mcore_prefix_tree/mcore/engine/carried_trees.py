"""Micro-batches of trees above the budget: a chunk each, and the first passes over the tokens that chunks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.layout.tree_chunks import (
    ChunkLayout,
    count_supervised,
    cut,
    find_carried,
    find_handed_on,
    find_key_nodes,
    find_last_readers,
    find_paths,
    find_stack,
    keep_tokens,
)
from mcore_prefix_tree.mcore.engine.folding import Folding, plan_attention
from mcore_prefix_tree.mcore.seam.carried_keys import Carry, CarryStore, Passage, SampleCounts
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.packed_seq_params import DepthPackedSeqParams
from mcore_prefix_tree.metadata import Handover, TreeMetadata
from mcore_prefix_tree.plan import Carrying, ForestPlan, TreePart
from mcore_prefix_tree.plan.carry import make_chunks
from mcore_prefix_tree.plan.flops import ModelWork
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import Sharing, Trie, sort_samples, trie_from_order
from mcore_prefix_tree.utils.upload import upload

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def fold_carrying(
    samples: Sequence[Sample], cut: Sequence[Sequence[int]], carrying: Carrying | None, folding: Folding
) -> list[MicroBatch]:
    """Fold a rank's micro-batches, which may be parts of trees, on the host; ``cut`` has each one's samples."""
    if carrying is None:
        return [folding.micro_batch([samples[index] for index in indices]) for indices in cut]
    trees = {
        indices: _fold_tree([samples[index] for index in indices], runs, folding, trains=carrying.trains)
        for indices, runs in carrying.trees(cut).items()
    }
    batches: list[MicroBatch] = []
    for indices, run in zip(cut, carrying.runs, strict=True):
        if run.tokens:
            batches.append(trees[tuple(indices)].micro_batch(run))
        else:
            whole = folding.micro_batch([samples[index] for index in indices])
            batches.append(replace(whole, forward_only=run.forward_only))
    return batches


def cut_to_score(layout: FlatLayout, parts: int, folding: Folding) -> list[MicroBatch]:
    """Cut a layout into parts of about one size, which run forward only, from the first to the last; some are empty.

    Args:
        layout: layout of complete samples, whose tokens with a weight are scored.
        folding: settings of the micro-batches, of which those that plan are not read.
    """
    if parts == 1:
        batch = folding.with_settings(layout, needed=layout.edge_weight != 0)
        plan_attention(batch, folding.attention_backend, folding.attention_cases)
        return [batch]
    size = layout.physical_tokens
    position = layout.position_ids[:size].astype(np.int64)
    runs = make_chunks(position, sorted({size * number // parts for number in range(parts + 1)}))
    tree = _Tree.of(layout, np.zeros(size, dtype=np.int64), runs, folding, trains=False) if runs else None
    made = [tree.micro_batch(run) for run in runs] if tree is not None else []
    return made + [folding.micro_batch([]) for _ in range(parts - len(made))]


def count_carried_bytes(plan: ForestPlan, folding: Folding, work: ModelWork, *, hidden: bool = False) -> int:
    """Return the most bytes of keys, values, states and their gradients that a rank holds in a step.

    ``work`` has the number of layers and the size of states, of which a stage and a tensor rank has its share.
    ``hidden`` is whether last hidden states are held, too.
    """
    if plan.carrying is None or not folding.attention_cases:
        return 0
    case, config = folding.attention_cases[0], folding.config
    stages, of_gradient = config.pipeline_model_parallel_size, torch.promote_types(case.dtype, torch.float32).itemsize
    layers = -(-(work.layers + work.window_layers + work.sparse_layers) // stages)
    of_token: int = layers * case.kv_heads * (case.head_dim + case.value_dim) * (case.dtype.itemsize + of_gradient)
    of_token += hidden * config.hidden_size * (case.dtype.itemsize + of_gradient)
    of_state: int = 2 * work.state_bytes // (stages * config.tensor_model_parallel_size)
    return max(rank.held_tokens * of_token + rank.held_states * of_state for rank in plan.carrying)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tree:
    """A tree above the budget, folded once.

    Attributes:
        carried: int64 ``[X]``, the tokens that chunks read, as indices in ``layout``, in the order of the first pass.
        owner: int64 ``[X]``, the chunk of each.
        reader: int64 ``[X]``, the last chunk that reads each.
        passes: the first passes over them.
        shelf, row: int64 ``[X]``, the place of each in the store.
        supervised: int64 ``[T]``, see :func:`count_supervised`.
        trains: see :class:`Carrying`.
    """

    layout: FlatLayout
    chunks: Sequence[TreePart]
    carried: Int64Array
    owner: Int64Array
    reader: Int64Array
    passes: Sequence[TreePart]
    shelf: Int64Array
    row: Int64Array
    supervised: Int64Array
    folding: Folding
    store: CarryStore
    trains: bool

    @classmethod
    def of(
        cls, layout: FlatLayout, supervised: Int64Array, runs: Sequence[TreePart], folding: Folding, *, trains: bool
    ) -> _Tree:
        """Return the tree of a layout, to be run in parts."""
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
            supervised=supervised,
            folding=folding,
            store=CarryStore(),
            trains=trains,
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
        row = np.zeros_like(self.shelf)
        row[self.has_state] = _count_before(self.shelf[self.has_state])
        return row

    @cached_property
    def last(self) -> Int64Array:
        """int64 ``[S]``, the last token of each sample."""
        return self.layout.sample_map[self.layout.cu_sample_lens[1:] - 1].astype(np.int64)

    @cached_property
    def by_index(self) -> Int64Array:
        """int64 ``[X]``, the order of the carried tokens in ``layout``."""
        return np.argsort(self.carried)

    def micro_batch(self, part: TreePart) -> MicroBatch:
        """Return the micro-batch of a part."""
        return self._first_pass(part) if part.forward_only else self._chunk(part)

    def _chunk(self, chunk: TreePart) -> MicroBatch:
        start, end, *_ = chunk
        number = self.chunks.index(chunk)
        layout = cut(
            self.layout,
            start,
            end,
            padded_size=self.folding.padding.size(chunk.tokens),
            num_supervised=int(self.supervised[start:end].sum()),
        )
        stack = self.by_index[np.searchsorted(self.carried, find_stack(self.layout, start), sorter=self.by_index)]
        own = np.flatnonzero(self.owner == number)
        scored = np.setdiff1d(self.shelf[self.reader == number], self.shelf[self.reader > number])
        # In training the chunk before runs next.
        last = np.unique(self.shelf[self.owner == number - 1]) if self.trains else scored
        needed = layout.edge_weight != 0 if self.folding.only_supervised else None
        return self._made(layout, stack, own, self.carried[own] - start, (last, scored), needed, keeps=not self.trains)

    def _first_pass(self, run: TreePart) -> MicroBatch:
        """Return a micro-batch of carried tokens, which scores nothing."""
        layout = cut(self.above, run.start, run.end, padded_size=self.folding.padding.size(run.tokens))
        own, nothing = np.arange(run.start, run.end), np.zeros(layout.num_places, dtype=np.bool_)
        stack = find_stack(self.above, run.start)
        batch = self._made(layout, stack, own, own - run.start, (own[:0], own[:0]), nothing, keeps=True)
        return replace(batch, forward_only=True)

    def _made(
        self,
        layout: ChunkLayout,
        stack: Int64Array,
        own: Int64Array,
        places: Int64Array,
        last: tuple[Int64Array, Int64Array],
        needed: npt.NDArray[np.bool_] | None,
        *,
        keeps: bool,
    ) -> MicroBatch:
        """Return a micro-batch that reads ``stack``, int64 ``[S]`` places in ``carried``, and leaves ``own`` at places.

        Both are int64 ``[n]``; for ``last``, of training and of scoring, int64 ``[m]``, and ``keeps`` see
        :class:`Carry`.
        """
        batch = self.folding.with_settings(layout, needed=needed)
        params = batch.packed_seq_params
        assert params.tree_metadata is not None, "it is made of a layout"
        keys = TreeMetadata.from_nodes(
            *find_key_nodes(layout.whole, layout.start, layout.start + layout.physical_tokens),
            padded_size=len(stack) + layout.padded_size,
        )
        handover, states = self._handover(layout, stack, own, places)
        sample_node, counts = self._samples(layout, places)
        carry = Carry(
            keys=replace(keys, unread=len(stack)),
            tokens=Passage(_by_shelf(self.shelf[stack], self.row[stack]), _by_shelf(self.shelf[own], places)),
            states=states,
            last=tuple(last[0].tolist()),
            last_scored=tuple(last[1].tolist()),
            store=self.store,
            keeps=keeps,
            counts=counts if self.trains else None,
        )
        metadata = replace(params.tree_metadata, sample_node=sample_node, handover=handover)
        params = replace(params, tree_metadata=metadata, carry=carry)
        if self.trains and self.folding.depths:
            params = replace(params, depths=DepthPackedSeqParams.from_layout(layout, params, layout.depth_edge_weight))
        batch = replace(batch, packed_seq_params=params)
        plan_attention(batch, self.folding.attention_backend, self.folding.attention_cases)
        return batch

    def _handover(
        self, layout: ChunkLayout, stack: Int64Array, own: Int64Array, places: Int64Array
    ) -> tuple[Handover, Passage]:
        """Return where states of recurrent layers come in and are left, and their rows; arguments as :meth:`_made`."""
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
        is_counted[carried] = not is_chunk
        on_path = find_paths(self.layout, first if is_chunk else self.carried[first], self.last)
        counted = np.add.reduceat(is_counted, layout.cu_node_lens[:-1])
        last = on_path.shape[1] - 1 - on_path[:, ::-1].argmax(axis=1)
        return np.where(on_path.any(axis=1), last, -1).astype(np.int32), SampleCounts(
            part=(is_chunk, layout.start),
            is_counted=upload(is_counted, "cpu"),
            samples=upload(np.flatnonzero(on_path @ counted), "cpu"),
            lengths=upload(np.diff(self.layout.cu_sample_lens).astype(np.float32), "cpu"),
        )


def _fold_tree(samples: Sequence[Sample], runs: Sequence[TreePart], folding: Folding, *, trains: bool) -> _Tree:
    """Fold a tree's samples, in depth-first order, to be run in parts."""
    layout = fold(samples, trie=_trie_as_planned(samples, folding.sharing), depths=folding.depths)
    return _Tree.of(layout, count_supervised(samples, layout), runs, folding, trains=trains)


def _trie_as_planned(samples: Sequence[Sample], sharing: Sharing) -> Trie:
    """Return the trie of a plan's trees: some of a step's can have another order by themselves."""
    order, shared = sort_samples(samples, sharing)
    trees = np.split(np.arange(len(order)), np.flatnonzero(shared == 0)[1:])
    places = np.concatenate(sorted(trees, key=lambda tree: int(order[tree].min())))
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    return trie_from_order(order[places], shared[places], lengths[order[places]])


def _count_before(shelf: Int64Array) -> Int64Array:
    """Return how many before each are on the same shelf, int64 ``[n]``."""
    by_shelf = np.argsort(shelf, kind="stable")
    count = np.empty_like(shelf)
    count[by_shelf] = np.arange(len(shelf)) - np.searchsorted(shelf[by_shelf], shelf[by_shelf])
    return count


def _by_shelf(shelf: Int64Array, values: Int64Array) -> tuple[tuple[int, torch.Tensor], ...]:
    """Return the values of each shelf, both int64 ``[n]``; along a path shelves ascend."""
    return tuple((number, upload(values[shelf == number], "cpu")) for number in np.unique(shelf).tolist())
