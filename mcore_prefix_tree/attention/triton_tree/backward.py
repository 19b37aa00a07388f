"""The backward kernels: ``delta``, then dK and dV by blocks of keys, then dQ by blocks of queries.

No two programs of these write the same element, and each adds up in a fixed order: the same bits twice. A kernel of dK
and dV that also adds its share of dQ with atomics saves two of seven products, but took 1.2 to 1.4 times as long on an
H200: its tiles have to be smaller.

Legend: as in ``forward.py``. ``delta = sum(out * grad_out)`` is the term that the softmax's Jacobian subtracts (Dao,
FlashAttention-2, 2023, algorithm 2).
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


@triton.jit(do_not_specialize=["size", "stride"])
def delta_kernel(
    out,  # [H, P, W], as load_rows takes it
    grad_out,  # [H, P, W], likewise
    delta,  # fp32 [H, R], written
    size,  # P
    stride,  # R
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PART: tl.constexpr,  # the width of the parts that VALUE_DIM is taken in
    BLOCK_M: tl.constexpr,
    ENGINE: tl.constexpr,
):
    """One program for each block of queries of one head: ``sum(out * grad_out)`` of their rows."""
    head = tl.program_id(0) % HEADS
    start = tl.program_id(0) // HEADS * BLOCK_M
    o = load_rows(out, head, start, size, BLOCK_M, VALUE_DIM, VALUE_PART, ENGINE)
    do = load_rows(grad_out, head, start, size, BLOCK_M, VALUE_DIM, VALUE_PART, ENGINE)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for part in tl.static_range(len(o)):
        total += tl.sum(o[part].to(tl.float32) * do[part].to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * stride + start + tl.arange(0, BLOCK_M), total)


@triton.jit
def _sums_at(
    sums, head, start, stride, part: tl.constexpr, parts: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr
):
    """Return pointers to a part of a tile of ``sums``, fp32 ``[heads, stride, parts * PART]``; no mask is needed."""
    row = head.to(tl.int64) * stride + start + tl.arange(0, ROWS)
    column = tl.arange(0, PART) + part * PART
    return sums + row[:, None] * (parts * PART) + column[None, :]


@triton.jit
def _store_sums(target, partial, rows, head, start, size, stride, splits, WIDTH: tl.constexpr, ENGINE: tl.constexpr):
    """To ``target``, or to ``partial`` if a group is split. Either is compiled: how many tokens there are decides."""
    if partial is None:
        store_rows(target, rows, head, start, size, WIDTH, ENGINE)
    else:
        ROWS: tl.constexpr = rows[0].shape[0]
        PART: tl.constexpr = rows[0].shape[1]
        if splits > 1:
            for part in tl.static_range(len(rows)):
                if ENGINE:
                    partial.store([head, start, part * PART], tl.reshape(rows[part], [1, ROWS, PART]))
                else:
                    pointers = _sums_at(partial, head, start, stride, part, len(rows), ROWS, PART)
                    tl.store(pointers, rows[part])
        else:
            store_rows(target, rows, head, start, size, WIDTH, ENGINE)


@triton.jit(do_not_specialize=["size", "key_blocks", "stride", "splits", "window"])
def key_value_kernel(
    query,  # [H, P, D], as load_rows takes it
    key,  # [K, P, D], likewise
    value,  # [K, P, W], likewise
    grad_out,  # [H, P, W], likewise
    grad_key,  # None or [K, P, D], likewise, written unless splits is above 1
    grad_value,  # None or [K, P, W], likewise
    partial_key,  # None or fp32 [K * splits, R, D in full parts], written if splits is above 1; a descriptor if ENGINE
    partial_value,  # None or fp32 [K * splits, R, W in full parts], likewise
    lse,  # fp32 [H, R]
    delta,  # fp32 [H, R]
    end,  # int32 [R]
    position,  # int32 [R]
    schedule,  # int32, of the key blocks
    size,  # P
    key_blocks,
    stride,  # R
    splits,  # the query heads of a group are divided among this many programs
    softmax_scale,
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
    LISTED: tl.constexpr,  # whether the schedule has a list, not ranges
):
    """One program for each block of keys of one head, or of a split of its query heads."""
    turn, out_head = place_program(key_blocks, KV_HEADS_AT_ONCE * splits)
    kv_head = out_head // splits
    heads = GROUP // splits
    first_head = kv_head * GROUP + out_head % splits * heads
    key_block = tl.load(schedule + 4 * key_blocks + turn)
    bounds = schedule + key_block
    blocks = schedule + 5 * key_blocks
    first = tl.load(bounds)
    diagonal_end = tl.load(bounds + key_blocks)
    full = tl.load(bounds + 2 * key_blocks) - diagonal_end
    masked = tl.load(bounds + 3 * key_blocks) - first - full

    start = key_block * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    column_end = tl.load(end + column)[:, None]
    column_position = tl.load(position + column)[:, None] if window is not None else None
    k = load_rows(key, kv_head, start, size, BLOCK_N, HEAD_DIM, HEAD_PART, ENGINE)
    v = load_rows(value, kv_head, start, size, BLOCK_N, VALUE_DIM, VALUE_PART, ENGINE)
    grad_k = zeros(BLOCK_N, HEAD_DIM, HEAD_PART)
    grad_v = zeros(BLOCK_N, VALUE_DIM, VALUE_PART)

    # Diagonal and tail tiles share a loop, so that tails compare more than needed: a third loop would spill.
    for KIND in tl.static_range(KINDS - 1):
        count = masked if KIND == DIAGONAL else full
        # One loop over blocks and heads: a head's first loads hide behind the last products of the head before.
        # Both are counted: a division for each tile takes many instructions.
        head = first_head
        index = 0
        for _ in tl.range(0, count * heads, num_stages=STAGES):
            place = (first if KIND == DIAGONAL else diagonal_end) + index
            if KIND == DIAGONAL:
                place += tl.where(place < diagonal_end, 0, full)
            row_start = (tl.load(blocks + place) if LISTED else place) * BLOCK_M
            row = row_start + tl.arange(0, BLOCK_M)
            q = load_rows(query, head, row_start, size, BLOCK_M, HEAD_DIM, HEAD_PART, ENGINE)
            do = load_rows(grad_out, head, row_start, size, BLOCK_M, VALUE_DIM, VALUE_PART, ENGINE)
            statistics = head.to(tl.int64) * stride + row
            row_lse = tl.load(lse + statistics)[None, :]
            row_delta = tl.load(delta + statistics)[None, :]

            # Keys by queries, so that the weights are in the layout of the products with dO and Q.
            score = products(k, q)
            weight = tl.exp2(score * scale - row_lse)
            if KIND != FULL:
                row_position = tl.load(position + row)[None, :] if window is not None else None
                seen = visible(row[None, :], column[:, None], column_end, row_position, column_position, window, KIND)
                weight = tl.where(seen, weight, 0.0)
            if grad_value is not None:
                grad_v = add_weighted(grad_v, weight, do)
            if grad_key is not None:
                # Not before the product above: two tiles of scores at once would not fit the registers.
                weight_grad = products(v, do)
                score_grad = weight * (weight_grad - row_delta)
                score_grad = score_grad.to(q[0].dtype)
                grad_k = add_weighted(grad_k, score_grad, q)
            index += 1
            head += tl.where(index == count, 1, 0)
            index = tl.where(index == count, 0, index)

    if grad_key is not None:
        grad_k = scaled(grad_k, softmax_scale)
        _store_sums(grad_key, partial_key, grad_k, out_head, start, size, stride, splits, HEAD_DIM, ENGINE)
    if grad_value is not None:
        _store_sums(grad_value, partial_value, grad_v, out_head, start, size, stride, splits, VALUE_DIM, ENGINE)


@triton.jit(do_not_specialize=["size", "query_blocks", "stride", "window"])
def query_kernel(
    query,  # [H, P, D], as load_rows takes it
    key,  # [K, P, D], likewise
    value,  # [K, P, W], likewise
    grad_out,  # [H, P, W], likewise
    grad_query,  # [H, P, D], likewise, written
    lse,  # fp32 [H, R]
    delta,  # fp32 [H, R]
    end,  # int32 [R]
    position,  # int32 [R]
    schedule,  # int32, of the query blocks
    size,  # P
    query_blocks,
    stride,  # R
    softmax_scale,
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
    """One program for each block of queries of one head."""
    turn, head = place_program(query_blocks, KV_HEADS_AT_ONCE * GROUP)
    kv_head = head // GROUP
    query_block = tl.load(schedule + 4 * query_blocks + turn)
    blocks = 5 * query_blocks

    start = query_block * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    statistics = head.to(tl.int64) * stride + row
    row_lse = tl.load(lse + statistics)[:, None]
    row_delta = tl.load(delta + statistics)[:, None]
    row_position = tl.load(position + row)[:, None] if window is not None else None
    q = load_rows(query, head, start, size, BLOCK_M, HEAD_DIM, HEAD_PART, ENGINE)
    do = load_rows(grad_out, head, start, size, BLOCK_M, VALUE_DIM, VALUE_PART, ENGINE)
    grad_q = zeros(BLOCK_M, HEAD_DIM, HEAD_PART)

    last = tl.load(schedule + query_block)
    for KIND in tl.static_range(KINDS):
        first = last
        last = tl.load(schedule + ((KIND + 1) * query_blocks + query_block))
        block = tl.load(schedule + (blocks + first))
        for place in tl.range(first, last, num_stages=STAGES):
            key_start = block * BLOCK_N
            block = tl.load(schedule + (blocks + place + 1))  # a step ahead, as in the forward kernel
            k = load_rows(key, kv_head, key_start, size, BLOCK_N, HEAD_DIM, HEAD_PART, ENGINE)
            v = load_rows(value, kv_head, key_start, size, BLOCK_N, VALUE_DIM, VALUE_PART, ENGINE)
            score = products(q, k)
            weight_grad = products(do, v)
            weight = tl.exp2(score * scale - row_lse)
            if KIND != FULL:
                column = key_start + tl.arange(0, BLOCK_N)
                column_end = tl.load(end + column)[None, :]
                column_position = tl.load(position + column)[None, :] if window is not None else None
                seen = visible(row[:, None], column[None, :], column_end, row_position, column_position, window, KIND)
                weight = tl.where(seen, weight, 0.0)
            score_grad = weight * (weight_grad - row_delta)
            grad_q = add_weighted(grad_q, score_grad, k)
    grad_q = scaled(grad_q, softmax_scale)
    store_rows(grad_query, grad_q, head, start, size, HEAD_DIM, ENGINE)
