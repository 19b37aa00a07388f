"""Divergences between two distributions, row by row: of few outcomes, or of a whole vocabulary split over ranks.

Legend: R rows, C outcomes, V vocabulary, Vl its part on this tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

# Rows of logits in fp32 at a time: bounds the temporary memory at a few times ROWS * Vl.
ROWS = 256


def divergence(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    """``[R]`` from log-probabilities ``[R, C]``; differentiable in the student's. For the formulas see ``distill``."""
    return _terms(teacher, student, kind, jsd_beta).sum(dim=1)


def _terms(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    if kind == "forward_kl":
        return teacher.exp() * (teacher - student)
    if kind == "reverse_kl":
        return student.exp() * (student - teacher)
    mixture = _mixture(teacher, student, jsd_beta)
    return jsd_beta * teacher.exp() * (teacher - mixture) + (1 - jsd_beta) * student.exp() * (student - mixture)


def _mixture(teacher: torch.Tensor, student: torch.Tensor, jsd_beta: float) -> torch.Tensor:
    return torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))


def _slope(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    """``q dD/dq`` of each outcome, but for a constant times q, which has no effect through a softmax."""
    if kind == "forward_kl":
        return -teacher.exp()
    if kind == "reverse_kl":
        return student.exp() * (student - teacher)
    return (1 - jsd_beta) * student.exp() * (student - _mixture(teacher, student, jsd_beta))


class _VocabularyDivergence(torch.autograd.Function):
    """With ``s_v = q_v dD/dq_v``, the gradient at a logit is ``s_v - q_v sum_u s_u``."""

    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        row: torch.Tensor,
        kind: Divergence,
        jsd_beta: float,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        dtype = torch.promote_types(student.dtype, torch.float32)
        normaliser = torch.empty(2, len(row), dtype=dtype, device=student.device)
        for block in _blocks(row):
            for side, logits in enumerate((teacher, student)):
                normaliser[side, block] = torch.logsumexp(logits[row[block]].to(dtype), dim=1)
        _logsumexp_over_ranks(normaliser, group)
        sums = torch.zeros(2, len(row), dtype=dtype, device=student.device)
        for block in _blocks(row):
            p, q = _log_probabilities(teacher, student, row[block], normaliser[:, block])
            sums[0, block] = _terms(p, q, kind, jsd_beta).sum(dim=1)
            sums[1, block] = _slope(p, q, kind, jsd_beta).sum(dim=1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(student, teacher, row, normaliser, sums[1])
        ctx.kind, ctx.jsd_beta = kind, jsd_beta
        return sums[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_row,) = grad_outputs
        student, teacher, row, normaliser, slope_sum = ctx.saved_tensors
        grad = torch.zeros_like(student)
        for block in _blocks(row):
            p, q = _log_probabilities(teacher, student, row[block], normaliser[:, block])
            of_logits = _slope(p, q, ctx.kind, ctx.jsd_beta) - q.exp() * slope_sum[block, None]
            grad[row[block]] = (of_logits * grad_row[block, None]).to(grad.dtype)
        return grad, None, None, None, None, None


def _blocks(rows: torch.Tensor) -> list[slice]:
    return [slice(start, min(start + ROWS, len(rows))) for start in range(0, len(rows), ROWS)]


def _log_probabilities(
    teacher: torch.Tensor, student: torch.Tensor, row: torch.Tensor, normaliser: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        teacher[row].to(normaliser.dtype) - normaliser[0, :, None],
        student[row].to(normaliser.dtype) - normaliser[1, :, None],
    )


def _logsumexp_over_ranks(local: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    largest = local.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (local - largest).exp()
    dist.all_reduce(total, group=group)
    local.copy_(largest + total.log())


def vocabulary_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    row: torch.Tensor,
    kind: Divergence,
    *,
    jsd_beta: float = 0.5,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Divergence of whole vocabularies from logits; no temporary is as large as they are.

    Args:
        student: ``[P, Vl]`` logits, this rank's columns, in any floating dtype; reductions are in fp32 or better.
        teacher: the same of the teacher; has no gradient.
        row: int64 ``[R]``, which rows, each once.
        kind: see ``distill``.
        jsd_beta: of ``jsd``.
        group: tensor-parallel group over which the vocabulary is split, None if it is not.

    Returns:
        ``[R]`` in nats, equal on all ranks of the group.

    Raises:
        ValueError: if the two are not of one shape.
    """
    if student.shape != teacher.shape or student.ndim != 2:
        raise ValueError(
            f"the teacher's logits are {list(teacher.shape)} and the student's {list(student.shape)}; both must be "
            "[tokens, vocabulary] of one layout and one vocabulary"
        )
    result: torch.Tensor = _VocabularyDivergence.apply(  # type: ignore[no-untyped-call]
        student, teacher.detach(), row, kind, jsd_beta, group
    )
    return result


def divergence_gradient_(
    student: torch.Tensor,
    teacher: Callable[[slice], torch.Tensor],
    kind: Divergence,
    *,
    jsd_beta: float = 0.5,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The divergence of every row; turns the student's logits into the gradient of each row's divergence at them.

    Args:
        student: ``[R, Vl]`` logits, this rank's columns, in fp32 or wider.
        teacher: gives the teacher's logits, alike, of a slice of at most :data:`ROWS` of these rows.
        kind: see ``distill``.
        jsd_beta: of ``jsd``.
        group: as of :func:`vocabulary_divergence`.

    Returns:
        ``[R]`` in nats, equal on all ranks of the group.
    """
    found = student.new_empty(len(student))
    for block in _blocks(student):
        own = student[block]
        other = teacher(block).to(own.dtype)
        normaliser = torch.stack([torch.logsumexp(logits, dim=1) for logits in (other, own)])
        _logsumexp_over_ranks(normaliser, group)
        p, q = other - normaliser[0, :, None], own - normaliser[1, :, None]
        slope = _slope(p, q, kind, jsd_beta)
        sums = torch.stack([_terms(p, q, kind, jsd_beta).sum(dim=1), slope.sum(dim=1)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        found[block] = sums[0]
        own.copy_(slope.sub_(q.exp_().mul_(sums[1, :, None])))
    return found


def log1mexp(values: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))`` for x < 0 without cancellation (Maechler, "Accurately Computing log(1 - exp(-|a|))", 2012).

    At 0 and above (a certain token, or rounding), as for the last number below 0.
    """
    below = values.clamp(max=-torch.finfo(values.dtype).tiny)
    near = below > -0.6931471805599453
    # Either branch is given numbers that keep the other one's gradient finite.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, below, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, below))),
    )
