"""The sums of rows of logits, and the gradient that follows from them, as Triton kernels: one program for each row.

A logit is read once for the sums, and once for the gradient, which is written once, in the dtype of the product that
reads it. Sums are in fp32 and always in the same order.

Legend: B rows, E edges, Vl columns on this tensor-parallel rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mcore_prefix_tree.utils.triton_here import launch_kernel

COLUMNS, WARPS = 2048, 8
# Edges of a row at a time.
EDGES = 16
_LOWEST = tl.constexpr(-3.4028234663852886e38)
# As in mcore_prefix_tree.logprob.softmax.
_EXP_IS_ZERO = tl.constexpr(-1000.0)


@triton.jit
def sums_kernel(logits, stride, columns, scale, maximum, total, moment, COLUMNS: tl.constexpr):
    """Each lane of a program keeps its own maximum and sums, so that lanes meet once, at the end."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    multiplier = 1.0
    if scale is not None:
        multiplier = tl.load(scale + row)
    lane = tl.arange(0, COLUMNS)
    # A lane may have only logits of -inf, whose exponentials are 0 for any maximum.
    highest = tl.full([COLUMNS], _LOWEST, tl.float32)
    added = tl.zeros([COLUMNS], tl.float32)
    weighted = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        inside = lane < columns - start
        logit = multiplier * tl.load(logits + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        above = logit - highest
        rises = above > 0
        # Either the new term or all older ones are scaled by this: one exponential for each logit.
        below = tl.maximum(-tl.abs(above), _EXP_IS_ZERO, propagate_nan=tl.PropagateNan.ALL)
        factor = tl.exp(below)
        if moment is not None:
            weighted = tl.where(rises, (weighted + below * added) * factor, weighted + below * factor)
        added = tl.where(rises, added * factor + 1, added + factor)
        highest = tl.maximum(highest, logit)
    top = tl.max(highest, 0)
    below = tl.maximum(highest - top, _EXP_IS_ZERO, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.exp(below)
    tl.store(maximum + row, top)
    tl.store(total + row, tl.sum(added * factor, 0))
    if moment is not None:
        tl.store(moment + row, tl.sum((weighted + below * added) * factor, 0))


@triton.jit
def _gradient(logit, factor, maximum, per_row, per_entropy, center):
    """The gradient of logits without that of their edges, before scaling."""
    below = logit.to(tl.float32) * factor - maximum
    if per_entropy is None:
        weight = -per_row
    else:
        below = tl.maximum(below, _EXP_IS_ZERO, propagate_nan=tl.PropagateNan.ALL)
        weight = (center - below) * per_entropy
        if per_row is not None:
            weight -= per_row
    return tl.exp(below) * weight


@triton.jit
def gradient_kernel(
    logits, stride, columns, scale, maximum, total, moment, grad_row, grad_entropy, first, edge_column, edge_logit,
    edge_grad, out, out_stride, COLUMNS: tl.constexpr, EDGES: tl.constexpr
):  # fmt: skip
    """Overwrite a row, then the places of its edges, whose gradients are added before they are rounded."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    out += row.to(tl.int64) * out_stride
    factor = 1.0
    if scale is not None:
        factor = tl.load(scale + row)
    top = tl.load(maximum + row)
    shared = factor / tl.load(total + row)
    per_row, per_entropy, center = None, None, None
    if grad_row is not None:
        per_row = tl.load(grad_row + row) * shared
    if grad_entropy is not None:
        per_entropy = tl.load(grad_entropy + row) * shared
        center = tl.load(moment + row) / tl.load(total + row)
    lane = tl.arange(0, COLUMNS)
    for start in range(0, columns, COLUMNS):
        inside = lane < columns - start
        logit = tl.load(logits + start + lane, mask=inside, other=0.0)
        grad = _gradient(logit, factor, top, per_row, per_entropy, center)
        tl.store(out + start + lane, grad.to(out.dtype.element_ty), mask=inside)
    if first is not None:
        # Other threads of the program have written these places.
        tl.debug_barrier()
        begin, end = tl.load(first + row), tl.load(first + row + 1)
        for start in range(begin, end, EDGES):
            edge = start + tl.arange(0, EDGES)
            column = tl.load(edge_column + edge, mask=edge < end, other=0)
            logit = tl.load(edge_logit + edge, mask=edge < end, other=0.0)
            grad = _gradient(logit, factor, top, per_row, per_entropy, center)
            # Edges to the same token all write the sum of all.
            for other_start in range(begin, end, EDGES):
                other = other_start + tl.arange(0, EDGES)
                same = column[:, None] == tl.load(edge_column + other, mask=other < end, other=-1)[None, :]
                theirs = tl.load(edge_grad + other, mask=other < end, other=0.0)
                grad += factor * tl.sum(tl.where(same, theirs[None, :], 0.0), 1)
            tl.store(out + column, grad.to(out.dtype.element_ty), mask=edge < end)


@torch.library.custom_op("mcore_prefix_tree::softmax_sums", mutates_args=())
def softmax_sums(
    logits: torch.Tensor, scale: torch.Tensor | None, with_moment: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the maximum, total and moment of ``RowSums``, fp32 ``[B]``, of ``scale * logits``.

    ``logits`` are ``[B, Vl]`` with adjacent columns, in fp32, fp16 or bf16; ``scale`` is fp32 ``[B]``. Without
    ``with_moment`` the moment is ``[0]``.
    """
    rows, columns = logits.shape
    maximum, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    moment = torch.empty(rows if with_moment else 0, dtype=torch.float32, device=logits.device)
    if rows:
        launch_kernel(
            sums_kernel, rows, logits,
            logits, logits.stride(0), columns, scale, maximum, total, moment if with_moment else None,
            COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return maximum, total, moment


@softmax_sums.register_fake
def _(
    logits: torch.Tensor, scale: torch.Tensor | None, with_moment: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = len(logits)
    maximum, total, moment = (
        torch.empty(size, dtype=torch.float32, device=logits.device)
        for size in (rows, rows, rows if with_moment else 0)
    )
    return maximum, total, moment


@torch.library.custom_op("mcore_prefix_tree::softmax_gradient", mutates_args=("out",))
def softmax_gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    maximum: torch.Tensor,
    total: torch.Tensor,
    moment: torch.Tensor | None,
    grad_row: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    first: torch.Tensor | None,
    edge_column: torch.Tensor | None,
    edge_logit: torch.Tensor | None,
    edge_grad: torch.Tensor | None,
) -> None:
    """Write the gradient of ``logits`` ``[B, Vl]`` into ``out`` ``[B, Vl]``, which may be the logits.

    Args:
        scale: fp32 ``[B]``, factors of the logits; None is 1.
        maximum, total, moment: fp32 ``[B]``, sums over all ranks.
        grad_row, grad_entropy: fp32 ``[B]``, see ``LogitGrads``.
        first: int64 ``[B + 1]``, row r has edges ``first[r]:first[r + 1]``.
        edge_column, edge_logit, edge_grad: int64 ``[E]``, the dtype of the logits and fp32.
    """
    if len(logits):
        launch_kernel(
            gradient_kernel, len(logits), logits,
            logits, logits.stride(0), logits.shape[1], scale, maximum, total, moment, grad_row, grad_entropy, first,
            edge_column, edge_logit, edge_grad, out, out.stride(0), COLUMNS=COLUMNS, EDGES=EDGES, num_warps=WARPS,
        )  # fmt: skip


@softmax_gradient.register_fake
def _(*_: object) -> None:
    return None
