"""Micro-batches of trees above the budget: a chunk each, and before them those of the tokens that chunks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.layout.tree_chunks import (
    ChunkLayout,
    count_supervised,
    cut,
    find_carried,
    find_key_nodes,
    find_stack,
    keep_tokens,
)
from mcore_prefix_tree.mcore.engine.folding import Folding, plan_attention
from mcore_prefix_tree.mcore.seam.carried_keys import Carry, CarryStore
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import Carrying, Chunk, ForestPlan
from mcore_prefix_tree.plan.carry import first_pass
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import build_trie
from mcore_prefix_tree.utils.upload import upload

Int64Array = npt.NDArray[np.int64]


def fold_carrying(
    samples: Sequence[Sample], cut: Sequence[Sequence[int]], carrying: Carrying | None, folding: Folding, *, train: bool
) -> list[MicroBatch]:
    """Fold a rank's micro-batches, of which some may be chunks, on the host; ``cut`` has the indices of their samples.

    To train, the chunks of a tree run last to first, after the first pass (``MicroBatch.before``). Otherwise they run
    first to last, and each keeps what later ones read.
    """
    if carrying is None:
        return [folding.micro_batch([samples[index] for index in indices]) for indices in cut]
    batches: list[MicroBatch] = []
    before: list[MicroBatch] = []
    for indices, group in groupby(zip(cut, carrying.chunks, strict=True), key=lambda pair: tuple(pair[0])):
        own = [samples[index] for index in indices]
        chunks = [chunk for _, chunk in group]
        if chunks[0] is None:
            batches += [folding.micro_batch(own) for _ in chunks]
            continue
        tree = _Tree.of(own, [chunk for chunk in chunks[::-1] if chunk is not None], folding)
        if train:
            before += tree.first_pass(carrying.max_tokens)
            batches += [tree.micro_batch(number, keeps=False) for number in reversed(range(len(chunks)))]
        else:
            batches += [tree.micro_batch(number, keeps=True) for number in range(len(chunks))]
    if train:
        before += [folding.micro_batch([]) for _ in range(carrying.first_pass - len(before))]
        batches[0] = replace(batches[0], before=tuple(before))
    return batches


def why_not_carried(config: Any, objective: Objective | None) -> str | None:
    """Return why the samples of a job are not cut, None if they can be.

    ``config`` is a ``TransformerConfig``; without an objective, samples are only scored.
    """
    if objective is not None and not objective.sums_edges:
        return "the objective's loss reads whole samples"
    if config.experimental_attention_variant is not None or getattr(config, "is_hybrid_model", False):
        return "layers of the model may read more of a path than keys and values of attention"
    if config.mtp_num_layers and objective is not None and objective.is_weighted_sum:
        return "multi-token prediction reads tokens before a chunk"
    if config.num_moe_experts is not None:
        balances = np.any(config.moe_aux_loss_coeff) and config.moe_router_load_balancing_type != "none"
        if balances or config.moe_z_loss_coeff or config.moe_router_enable_expert_bias:
            return "the model's routers balance experts by whole samples"
    return None


def count_carried_bytes(plan: ForestPlan, folding: Folding) -> int:
    """Return the bytes of the keys and values that the first pass of a step keeps, of the rank with the most."""
    if plan.carrying is None or not folding.attention_cases:
        return 0
    case, config = folding.attention_cases[0], folding.config
    layers: int = -(-config.num_layers // config.pipeline_model_parallel_size)
    of_token = layers * case.kv_heads * (case.head_dim + case.value_dim) * case.dtype.itemsize
    return max(rank.carried_tokens for rank in plan.carrying) * of_token


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tree:
    """A tree above the budget, folded once.

    Attributes:
        carried: int64 ``[n]``, the tokens that chunks read, as indices in ``layout``.
        shelves: int64 ``[C + 1]``, chunk c's own carried tokens are ``carried[shelves[c]:shelves[c + 1]]``.
        supervised: int64 ``[T]``, see :func:`count_supervised`.
    """

    layout: FlatLayout
    chunks: Sequence[Chunk]
    carried: Int64Array
    shelves: Int64Array
    supervised: Int64Array
    folding: Folding
    store: CarryStore

    @classmethod
    def of(cls, samples: Sequence[Sample], chunks: Sequence[Chunk], folding: Folding) -> _Tree:
        """Fold a tree's samples, to be cut into ``chunks``, in depth-first order."""
        layout = fold(samples, trie=build_trie(samples, folding.sharing))
        borders = [0, *(chunk.end for chunk in chunks)]
        carried = find_carried(layout, borders)
        return cls(
            layout=layout,
            chunks=chunks,
            carried=carried,
            shelves=np.searchsorted(carried, borders),
            supervised=count_supervised(samples, layout),
            folding=folding,
            store=CarryStore(),
        )

    def micro_batch(self, number: int, *, keeps: bool) -> MicroBatch:
        """Return a chunk's micro-batch; ``keeps`` as in :class:`Carry`."""
        start, end, _ = self.chunks[number]
        layout = cut(
            self.layout,
            start,
            end,
            padded_size=self.folding.padding.size(end - start),
            num_supervised=int(self.supervised[start:end].sum()),
        )
        rows = slice(self.shelves[number], self.shelves[number + 1])
        own = ((number, self.carried[rows] - start),) if rows.stop > rows.start else ()
        stack = np.searchsorted(self.carried, find_stack(self.layout, start))
        needed = layout.edge_weight != 0 if self.folding.only_supervised else None
        return self._made(layout, stack, own, needed, keeps=keeps)

    def first_pass(self, max_tokens: int) -> list[MicroBatch]:
        """Return the micro-batches of the carried tokens, which score nothing."""
        layout, batches = keep_tokens(self.layout, self.carried), []
        for group in first_pass(self.chunks, max_tokens):
            borders = self.shelves[group.start : group.stop + 1]
            start, end = int(borders[0]), int(borders[-1])
            run = cut(layout, start, end, padded_size=self.folding.padding.size(end - start))
            own = tuple(
                (number, np.arange(self.shelves[number], self.shelves[number + 1]) - start)
                for number in range(group.start, group.stop)
                if self.shelves[number + 1] > self.shelves[number]
            )
            nothing = np.zeros(run.num_places, dtype=np.bool_)
            batches.append(self._made(run, find_stack(layout, start), own, nothing, keeps=True))
        return batches

    def _made(
        self,
        layout: ChunkLayout,
        stack: Int64Array,
        own: tuple[tuple[int, Int64Array], ...],
        needed: npt.NDArray[np.bool_] | None,
        *,
        keeps: bool,
    ) -> MicroBatch:
        """Return a micro-batch that reads ``stack``, int64 ``[S]`` rows of ``carried``, and leaves ``own``."""
        batch = self.folding.with_settings(layout, needed=needed)
        params = batch.packed_seq_params
        assert params.tree_metadata is not None, "it is made of a layout"
        shelf = np.searchsorted(self.shelves, stack, side="right") - 1
        # Shelves of chunks without carried tokens are empty: their border is that of the next.
        keys = TreeMetadata.from_nodes(
            *find_key_nodes(layout.whole, layout.start, layout.start + layout.physical_tokens),
            padded_size=len(stack) + layout.padded_size,
        )
        carry = Carry(
            keys=replace(keys, unread=len(stack)),
            stack=tuple(
                (number, upload(stack[shelf == number] - self.shelves[number], "cpu"))
                for number in np.unique(shelf).tolist()
            ),
            own=tuple((number, upload(places, "cpu")) for number, places in own),
            store=self.store,
            keeps=keeps,
        )
        # Its nodes are a part of the tree, and its samples are not in it as a whole.
        metadata = replace(params.tree_metadata, sample_node=None)
        batch = replace(batch, packed_seq_params=replace(params, tree_metadata=metadata, carry=carry))
        plan_attention(batch, self.folding.attention_backend, self.folding.attention_cases)
        return batch
