"""Scores of an indexer for some queries and keys of a tree, as a Triton kernel: one program for each tile of both.

A program holds its keys and takes one head of its queries after another, so that only the sum over heads is written,
with the tree's mask.

Legend: S tokens, I heads of the indexer, E their size, B queries and N keys of a call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mcore_prefix_tree.utils.triton_here import launch_kernel

# Queries and keys of a tile, and warps. For E up to 128 they fit every chip: tests/kernels/test_compile.py.
LAUNCH = (64, 128, 8)
# Without tensor cores.
LAUNCH_FP32 = (32, 32, 4)
STAGES = 2


@triton.jit
def _rows(pointers, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the vectors of DIM numbers that begin at pointers, ``[ROWS, WIDTH]``; zero outside."""
    entry = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None]
    if WIDTH > DIM:
        mask &= entry < DIM
    return tl.load(pointers[:, None] + entry, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["first", "queries", "keys"])
def index_kernel(
    query,  # [B, I, E]
    key,  # [S, E]
    weight,  # [B, I]
    end,  # int32 [S]
    columns,  # int64 [N]
    out,  # fp32 [B, N], written
    first,  # the token of the first query
    queries,  # B
    keys,  # N
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # 2^n, at least DIM
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write ``sum over heads of weight * relu(q k)``, -inf where ``j <= i < subtree_end[j]`` does not hold."""
    tiles = tl.cdiv(keys, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_query, is_key = row < queries, place < keys
    token = first + row
    column = tl.load(columns + place, mask=is_key, other=0)
    # No query sees a key past the last one.
    column_end = tl.load(end + column, mask=is_key, other=0)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # Most tiles of other branches end here. The mask of pairs is made later: during the products it would spill.
    if (tl.max(column_end, 0) > tl.min(token, 0)) & (tl.min(column, 0) <= tl.max(token, 0)):
        k = _rows(key + column * DIM, is_key, DIM, WIDTH)
        vector = row.to(tl.int64) * HEADS
        for head in tl.range(0, HEADS, num_stages=STAGES):
            q = _rows(query + (vector + head) * DIM, is_query, DIM, WIDTH)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            if RELU:
                score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total += tl.load(weight + vector + head, mask=is_query, other=0.0).to(tl.float32)[:, None] * score
    seen = (column[None, :] <= token[:, None]) & (token[:, None] < column_end[None, :])
    pointers = out + row.to(tl.int64)[:, None] * keys + place[None, :]
    tl.store(pointers, tl.where(seen, total, float("-inf")), mask=is_query[:, None] & is_key[None, :])


@torch.library.custom_op("mcore_prefix_tree::index_scores", mutates_args=())
def index_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    weight: torch.Tensor,
    subtree_end: torch.Tensor,
    columns: torch.Tensor,
    first: int,
    relu: bool,
) -> torch.Tensor:
    """Return ``sum over heads of weight * relu(q k)``, fp32 ``[B, N]``, -inf where the query does not see the key.

    Args:
        query: ``[B, I, E]``, in the dtype of the keys: fp32, fp16 or bf16. Sums have fp32. Every tensor is contiguous.
        key: ``[S, E]``.
        weight: ``[B, I]`` in any of these dtypes.
        subtree_end: int32 ``[S]`` of the tree.
        columns: int64 ``[N]``, the keys to score.
        first: the token of the first query; the others follow it.
        relu: whether products below 0 count as 0.
    """
    queries, heads, dim = query.shape
    rows, keys, warps = LAUNCH_FP32 if query.dtype == torch.float32 else LAUNCH
    out = torch.empty(queries, len(columns), dtype=torch.float32, device=query.device)
    launch_kernel(
        index_kernel, triton.cdiv(queries, rows) * triton.cdiv(len(columns), keys), query,
        query, key, weight, subtree_end, columns, out, first, queries, len(columns),
        HEADS=heads, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)), RELU=relu, BLOCK_M=rows, BLOCK_N=keys,
        STAGES=STAGES, num_warps=warps,
    )  # fmt: skip
    return out


@index_scores.register_fake
def _(query: torch.Tensor, key: object, weight: object, end: object, columns: torch.Tensor, *rest: int) -> torch.Tensor:
    return query.new_empty((len(query), len(columns)), dtype=torch.float32)
