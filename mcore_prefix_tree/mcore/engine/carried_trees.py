"""Micro-batches of trees above the budget: a chunk each, and the first passes over the tokens that chunks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.layout.tree_chunks import count_supervised
from mcore_prefix_tree.mcore.engine.folding import Folding, plan_attention
from mcore_prefix_tree.mcore.seam.layout_in_parts import LayoutInParts
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.packed_seq_params import DepthPackedSeqParams
from mcore_prefix_tree.plan import Carrying, ForestPlan, TreePart
from mcore_prefix_tree.plan.carry import make_chunks
from mcore_prefix_tree.plan.flops import ModelWork
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import sort_samples, trie_from_order

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
    in_parts = LayoutInParts.of(layout, runs, trains=False, windows=_windows(folding))
    tree = _Tree(parts=in_parts, supervised=np.zeros(size, dtype=np.int64), folding=folding)
    made = [tree.micro_batch(run) for run in runs]
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
    sizes = case.kv_heads * (case.head_dim + case.value_dim)
    if config.multi_latent_attention:
        sizes = min(sizes, config.kv_lora_rank + config.qk_pos_emb_head_dim)
    of_token: int = layers * sizes * (case.dtype.itemsize + of_gradient)
    of_token += hidden * config.hidden_size * (case.dtype.itemsize + of_gradient)
    of_state: int = 2 * work.state_bytes // (stages * config.tensor_model_parallel_size)
    return max(rank.held_tokens * of_token + rank.held_states * of_state for rank in plan.carrying)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tree:
    """A tree above the budget, folded once; ``supervised`` is int64 ``[T]``, see :func:`count_supervised`."""

    parts: LayoutInParts
    supervised: Int64Array
    folding: Folding

    def micro_batch(self, run: TreePart) -> MicroBatch:
        """Return the micro-batch of a part; that of a first pass scores nothing."""
        folding = self.folding
        part = self.parts.lay_out(run, folding.padding.size(run.tokens))
        layout, needed = part.layout, None
        if run.forward_only:
            needed = np.zeros(layout.num_places, dtype=np.bool_)
        else:
            layout = replace(layout, num_supervised=int(self.supervised[run.start : run.end].sum()))
            needed = layout.edge_weight != 0 if folding.only_supervised else None
        batch = folding.with_settings(layout, needed=needed)
        params = part.set_in(batch.packed_seq_params)
        if self.parts.trains and folding.depths:
            params = replace(params, depths=DepthPackedSeqParams.from_layout(layout, params, layout.depth_edge_weight))
        batch = replace(batch, packed_seq_params=params, forward_only=run.forward_only)
        plan_attention(batch, folding.attention_backend, folding.attention_cases)
        return batch


def _fold_tree(samples: Sequence[Sample], runs: Sequence[TreePart], folding: Folding, *, trains: bool) -> _Tree:
    """Fold a tree's samples, in depth-first order, to be run in parts."""
    # In the order of the plan's trees: some of a step's can have another order by themselves.
    order, shared = sort_samples(samples, folding.sharing)
    trees = np.split(np.arange(len(order)), np.flatnonzero(shared == 0)[1:])
    places = np.concatenate(sorted(trees, key=lambda tree: int(order[tree].min())))
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    trie = trie_from_order(order[places], shared[places], lengths[order[places]])
    layout = fold(samples, trie=trie, depths=folding.depths)
    parts = LayoutInParts.of(layout, runs, trains=trains, windows=_windows(folding))
    return _Tree(parts=parts, supervised=count_supervised(samples, layout), folding=folding)


def _windows(folding: Folding) -> list[int | None]:
    return [case.options.window for case in folding.attention_cases]
