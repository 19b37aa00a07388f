"""Attention of each query to the best-scored keys of its path, block by block: no tensor has a row of all pairs.

Queries are all tokens of a tree but its ``unread`` first ones, which a chunk reads of other chunks.

Legend: P queries, S tokens, H heads, K heads of the keys, D size of a key, W of a value, M of both, T keys of a query
at most, B queries of a block, N keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from mcore_prefix_tree.attention.tile_blocks import block_plan
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.triton_here import kernels_run_on

# Queries and keys of the blocks that tell which keys a block of queries sees.
_QUERIES, _KEYS = 256, 256
# Entries of the largest tensor of a block, for example the keys that its queries gather: 64 MiB of fp32.
_ENTRIES = 2**24
# Largest head of an indexer whose scores the kernel makes; DeepSeek-V3.2 and GLM-5 have this size.
_MAX_INDEX_DIM = 128
Score = Callable[[slice, torch.Tensor], torch.Tensor]


def _blocks(metadata: TreeMetadata) -> list[tuple[slice, list[slice]]]:
    """Return each block of queries, with the runs of keys that any of them sees, ascending."""
    size, unread, tiles = metadata.padded_size, metadata.unread, block_plan(metadata, _QUERIES, _KEYS).by_query
    assert tiles.blocks is not None
    found = []
    for row, (first, _, _, last) in enumerate(tiles.bounds.tolist()):
        start, stop = max(unread, row * _QUERIES), min(size, (row + 1) * _QUERIES)
        if stop <= unread:
            continue
        blocks = np.sort(tiles.blocks[first:last])
        runs = np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1)
        keys = [slice(int(run[0]) * _KEYS, min(stop, (int(run[-1]) + 1) * _KEYS)) for run in runs]
        found.append((slice(start - unread, stop - unread), keys))
    return found


def blocks_of_rows(metadata: TreeMetadata, heads: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of queries and the keys, int64 ``[N]``, that any of them sees; B * N * heads is bounded."""
    for queries, blocks in metadata.derived("blocks of chosen keys", _blocks):
        columns = _columns(blocks, metadata)
        for rows in _split(queries, len(columns) * heads):
            yield rows, columns


def path_mask(metadata: TreeMetadata, queries: slice, keys: torch.Tensor) -> torch.Tensor:
    """Return bool ``[B, N]``: whether a query sees a key, ``j <= i < subtree_end[j]``."""
    query = metadata.unread + torch.arange(queries.start, queries.stop, device=keys.device)[:, None]
    return (keys <= query) & (query < metadata.subtree_end[keys])


def score_by_kernel(
    query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor, metadata: TreeMetadata, *, relu: bool
) -> Score | None:
    """Return a function for :func:`choose_keys` that makes an indexer's scores by a kernel; None where torch has to.

    Args:
        query: ``[P, I, E]``, of I heads.
        key: ``[S, E]``.
        weight: ``[P, I]``.
        metadata: the tree.
        relu: whether products of queries and keys below 0 count as 0.
    """
    if not kernels_run_on(query) or key.dtype != query.dtype or query.shape[2] > _MAX_INDEX_DIM:
        return None
    from mcore_prefix_tree.attention.chosen_keys.index_scores import index_scores

    query, key, weight = (one.contiguous() for one in (query, key, weight))
    end, unread = metadata.subtree_end, metadata.unread
    return lambda rows, columns: index_scores(query[rows], key, weight[rows], end, columns, unread + rows.start, relu)


@torch.no_grad()
def choose_keys(score: Score, metadata: TreeMetadata, topk: int, heads: int) -> torch.Tensor:
    """Return the ``topk`` best keys of each query's path, int32 ``[P, T]``, best first, -1 after the last.

    ``torch.topk`` compares all keys of a query at once. Memory is O(P * T), and one block's scores.

    Args:
        score: makes the scores ``[B, N]`` of a block of queries and of keys, int64 ``[N]``; -inf where the query does
            not see the key.
        metadata: the tree.
        topk: keys to choose. T is it, or the length of the longest path if that is less.
        heads: scores of a query and a key that ``score`` keeps at a time.
    """
    width = min(topk, int(metadata.host_position_ids.max()) + 1)
    device = metadata.subtree_end.device
    chosen = torch.full((metadata.padded_size - metadata.unread, width), -1, dtype=torch.int32, device=device)
    for rows, columns in blocks_of_rows(metadata, heads):
        best, place = score(rows, columns).topk(min(width, len(columns)))
        chosen[rows, : place.shape[1]] = columns[place].masked_fill(best == -torch.inf, -1).int()
    return chosen


def attend_to_keys(
    query: torch.Tensor, memory: torch.Tensor, chosen: torch.Tensor, scale: float, value: slice
) -> torch.Tensor:
    """Return ``softmax(scale * q k^T, over the chosen keys) v``, ``[P, H, W]`` in the dtype of the memory.

    Sums have fp32, or fp64 in a model of fp64; so has the gradient of a key until all queries are added, by
    ``index_add_``, which is deterministic on a GPU under ``torch.use_deterministic_algorithms``. The backward pass
    gathers again, so memory is O(P * T) integers and one block's keys.

    Args:
        query: ``[P, H, D]``.
        memory: ``[S, K, M]``, of which the first D are the keys; each key head has ``H / K`` query heads.
        chosen: int32 ``[P, T]``, at least one key of each query; -1 is none.
        scale: factor of the scores.
        value: the part of M that is the values.
    """
    attended: torch.Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        query, memory, chosen, scale, value
    )
    return attended


class _Attend(torch.autograd.Function):
    """:func:`attend_to_keys`."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, memory: torch.Tensor, chosen: torch.Tensor, scale: float, value: slice
    ) -> torch.Tensor:
        """Return ``[P, H, W]``."""
        ctx.save_for_backward(query, memory, chosen)
        ctx.scale, ctx.value = scale, value
        out = memory.new_empty(*query.shape[:2], value.stop - value.start)
        for rows in _rows(memory, chosen, query.shape[1]):
            _, gathered, probability = _gather(query[rows], memory, chosen[rows], scale)
            out[rows] = torch.einsum("bkgt,btkw->bkgw", probability, gathered[..., value]).flatten(1, 2)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the queries and of the memory."""
        query, memory, chosen = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_memory = wide(torch.zeros_like(memory))
        for rows in _rows(memory, chosen, query.shape[1]):
            q, gathered, probability = _gather(query[rows], memory, chosen[rows], ctx.scale)
            g = wide(grad[rows]).view(*q.shape[:3], -1)
            change = torch.einsum("bkgw,btkw->bkgt", g, gathered[..., ctx.value])
            change = probability * (change - (change * probability).sum(-1, keepdim=True)) * ctx.scale
            size = q.shape[-1]
            grad_query[rows] = torch.einsum("bkgt,btkd->bkgd", change, gathered[..., :size]).flatten(1, 2)
            part = gathered.zero_()
            part[..., :size] = torch.einsum("bkgt,bkgd->btkd", change, q)
            part[..., ctx.value] += torch.einsum("bkgt,bkgw->btkw", probability, g)
            grad_memory.index_add_(0, chosen[rows].clamp(min=0).flatten(), part.flatten(0, 1))
        return grad_query, grad_memory.to(memory.dtype), None, None, None


def _rows(memory: torch.Tensor, chosen: torch.Tensor, heads: int) -> list[slice]:
    """Return blocks of queries, each of which gathers a bounded number of entries."""
    size, width = chosen.shape
    return _split(slice(0, size), width * max(heads, memory[0].numel()))


def _split(rows: slice, entries: int) -> list[slice]:
    """Split rows, each with so many entries, into blocks of a bounded number."""
    step = max(1, _ENTRIES // entries)
    return [slice(start, min(rows.stop, start + step)) for start in range(rows.start, rows.stop, step)]


def _columns(blocks: list[slice], metadata: TreeMetadata) -> torch.Tensor:
    """Return the keys of blocks, int64 ``[N]``."""
    device = metadata.subtree_end.device
    return torch.cat([torch.arange(keys.start, keys.stop, device=device) for keys in blocks])


def _gather(
    query: torch.Tensor, memory: torch.Tensor, chosen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries ``[B, K, H / K, D]``, their memory ``[B, T, K, M]`` and probabilities ``[B, K, H / K, T]``."""
    q = wide(query).view(len(query), memory.shape[1], -1, query.shape[-1])
    gathered = wide(memory[chosen.clamp(min=0)])
    scores = torch.einsum("bkgd,btkd->bkgt", q, gathered[..., : q.shape[-1]]) * scale
    return q, gathered, scores.masked_fill((chosen < 0)[:, None, None], -torch.inf).softmax(-1)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32, or fp64 if it has it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
