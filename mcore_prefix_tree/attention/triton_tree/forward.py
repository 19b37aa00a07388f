"""The forward kernel, one program per block of queries of one head; logits and log-sum-exps are in units of log 2.

Legend: P padded tokens, R P in full blocks, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mcore_prefix_tree.attention.triton_tree.tiles import (
    DIAGONAL,
    FULL,
    KINDS,
    add_weighted,
    load_rows,
    place_program,
    products,
    scaled,
    store_rows,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=["size", "query_blocks", "stride", "window"])
def forward_kernel(
    query,  # [H, P, D], as load_rows takes it
    key,  # [K, P, D], likewise
    value,  # [K, P, W], likewise
    out,  # [H, P, W], likewise, written
    lse,  # fp32 [H, R], written
    sinks,  # None or [H]
    end,  # int32 [R]
    position,  # int32 [R]
    schedule,  # int32, of the query blocks
    size,  # P
    query_blocks,
    stride,  # R
    scale,
    window,
    KV_HEADS_AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PART: tl.constexpr,  # the width of the parts that HEAD_DIM is taken in
    VALUE_PART: tl.constexpr,  # likewise
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ENGINE: tl.constexpr,
):
    """The online softmax (Milakov and Gimelshein, 2018) over the key blocks that the schedule lists."""
    turn, head = place_program(query_blocks, KV_HEADS_AT_ONCE * GROUP)
    kv_head = head // GROUP
    query_block = tl.load(schedule + 4 * query_blocks + turn)
    blocks = 5 * query_blocks

    start = query_block * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    row_position = tl.load(position + row)[:, None] if window is not None else None
    q = load_rows(query, head, start, size, BLOCK_M, HEAD_DIM, HEAD_PART, ENGINE)
    result = zeros(BLOCK_M, VALUE_DIM, VALUE_PART)
    if sinks is None:
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
    else:
        # One more key that every row sees, of value zero.
        highest = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)

    last = tl.load(schedule + query_block)
    for KIND in tl.static_range(KINDS):
        first = last
        last = tl.load(schedule + ((KIND + 1) * query_blocks + query_block))
        block = tl.load(schedule + (blocks + first))
        for place in tl.range(first, last, num_stages=STAGES):
            key_start = block * BLOCK_N
            # A step ahead: the next tile's address must not wait for memory. The place is a sum of 32 bits: for a
            # stepped pointer, ptxas has each matrix instruction wait for the one before it (test_compile.py).
            block = tl.load(schedule + (blocks + place + 1))
            k = load_rows(key, kv_head, key_start, size, BLOCK_N, HEAD_DIM, HEAD_PART, ENGINE)
            score = products(q, k)
            if KIND != FULL:
                column = key_start + tl.arange(0, BLOCK_N)
                column_end = tl.load(end + column)[None, :]
                column_position = tl.load(position + column)[None, :] if window is not None else None
                seen = visible(row[:, None], column[None, :], column_end, row_position, column_position, window, KIND)
                score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(highest, tl.max(score, 1) * scale)
            base = higher
            if KIND == DIAGONAL:
                # A row may have seen nothing yet: its own key can be in a later diagonal block.
                base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score * scale - base[:, None])
            decay = tl.exp2(highest - base)
            total = total * decay + tl.sum(weight, 1)
            highest = higher
            v = load_rows(value, kv_head, key_start, size, BLOCK_N, VALUE_DIM, VALUE_PART, ENGINE)
            result = add_weighted(scaled(result, decay[:, None]), weight, v)
        if KIND == DIAGONAL:
            # Every token has seen itself now. Rows past the end never see anything, and may not stay infinite.
            highest = tl.where(row < size, highest, 0.0)

    # A block of rows that nobody reads meets no key.
    result = scaled(result, 1.0 / tl.where(total == 0.0, 1.0, total)[:, None])
    store_rows(out, result, head, start, size, VALUE_DIM, ENGINE)
    tl.store(lse + head.to(tl.int64) * stride + row, highest + tl.log2(total), mask=row < size)
