"""Steps that the forward and the backward kernels have in common: load a tile, multiply it, mask it.

Triton's tiles have powers of two of rows and columns. Rows of another width are taken in parts, each a tile: a tile of
rows is a tuple of ``[ROWS, PART]``, and of most widths has one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Comparisons of a tile, in the order of a schedule's bounds: see mcore_prefix_tree.attention.tile_blocks. The
# third kind, the tails, is neither of the two that have a name here.
DIAGONAL = tl.constexpr(0)
FULL = tl.constexpr(1)
KINDS = tl.constexpr(3)


@triton.jit
def place_program(blocks, at_once):
    """Return the turn of this program's block in the schedule's order, and its head.

    Some heads take all turns, then the next heads: programs that run together read the same keys, from the cache.
    """
    turn = tl.program_id(0) % (blocks * at_once)
    head = tl.program_id(0) // (blocks * at_once) * at_once + turn % at_once
    return turn // at_once, head


@triton.jit
def _addresses(
    source, head, start, size, first: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr
):
    """Pointers to a tile whose columns begin at ``first``, and which of them are inside of the tensor."""
    pointer, head_stride, stride = source
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PART)[None, :] + first
    # Offsets within the tile fit 32 bits; its start may not.
    pointer += head.to(tl.int64) * head_stride + start.to(tl.int64) * stride
    inside = row < size - start
    if first + PART > WIDTH:
        inside &= column < WIDTH
    return pointer + (row * stride + column), inside


@triton.jit
def load_rows(
    source, head, start, size, ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ENGINE: tl.constexpr
):
    """Return tokens ``start:start + ROWS`` of one head, in parts of ``[ROWS, PART]``; zero outside of the tensor.

    ``source`` is a ``[heads, size, WIDTH]`` descriptor if the copy engine reads it (ENGINE), else a tuple of a pointer
    and the strides of a head and of a token.
    """
    rows = ()
    for first in tl.static_range(0, WIDTH, PART):
        if ENGINE:
            part = tl.reshape(source.load([head, start, first]), [ROWS, PART])
        else:
            pointers, inside = _addresses(source, head, start, size, first, ROWS, WIDTH, PART)
            part = tl.load(pointers, mask=inside, other=0.0)
        rows += (part,)
    return rows


@triton.jit
def store_rows(target, rows, head, start, size, WIDTH: tl.constexpr, ENGINE: tl.constexpr):
    """The inverse of :func:`load_rows`, to the dtype of the target."""
    ROWS: tl.constexpr = rows[0].shape[0]
    PART: tl.constexpr = rows[0].shape[1]
    for part in tl.static_range(len(rows)):
        if ENGINE:
            target.store([head, start, part * PART], tl.reshape(rows[part].to(target.dtype), [1, ROWS, PART]))
        else:
            pointers, inside = _addresses(target, head, start, size, part * PART, ROWS, WIDTH, PART)
            tl.store(pointers, rows[part].to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Return zeros for :func:`add_weighted` to add to: ``[ROWS, WIDTH]`` in parts, fp32."""
    sums = ()
    for _ in tl.static_range(0, WIDTH, PART):
        sums += (tl.zeros([ROWS, PART], dtype=tl.float32),)
    return sums


@triton.jit
def products(left, right):
    """``left @ right.T``, fp32: the product of each row of one tile with each row of the other."""
    total = tl.dot(left[0], tl.trans(right[0]), input_precision="ieee")
    for part in tl.static_range(1, len(left)):
        total = tl.dot(left[part], tl.trans(right[part]), total, input_precision="ieee")
    return total


@triton.jit
def add_weighted(sums, weight, rows):
    """``sums + weight @ rows``, fp32, in parts."""
    added = ()
    for part in tl.static_range(len(rows)):
        added += (tl.dot(weight.to(rows[part].dtype), rows[part], sums[part], input_precision="ieee"),)
    return added


@triton.jit
def scaled(rows, factor):
    """``rows * factor``, in parts."""
    parts = ()
    for part in tl.static_range(len(rows)):
        parts += (rows[part] * factor,)
    return parts


@triton.jit
def visible(row, column, end, row_position, column_position, window, KIND: tl.constexpr):
    """The mask of a tile that is not full, from vectors that broadcast against each other."""
    seen = row < end
    if KIND == DIAGONAL:
        seen &= column <= row
    if window is not None:
        seen &= row_position - column_position < window
    return seen
