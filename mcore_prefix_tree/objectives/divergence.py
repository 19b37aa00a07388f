"""Divergences between two distributions, row by row: of few outcomes, or of a full vocabulary split over ranks.

Legend: R rows, C outcomes, V vocabulary, Vl its part on this tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.edges import ROWS, slices
from mcore_prefix_tree.logprob.softmax import RowSums, over_ranks, softmax_sums
from mcore_prefix_tree.utils.choices import Divergence


def divergence(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    """Return ``[R]`` from log-probabilities ``[R, C]``; differentiable in the student's. Formulas: see ``distill``."""
    return _terms(teacher, student, kind, jsd_beta).sum(dim=1)


def _terms(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    """Return the terms ``[R, C]`` of the divergences from log-probabilities ``[R, C]``."""
    if kind == "forward_kl":
        return _gap(teacher, student)
    if kind == "reverse_kl":
        return _gap(student, teacher)
    mixture = _mixture(teacher, student, jsd_beta)
    return jsd_beta * _gap(teacher, mixture) + (1 - jsd_beta) * _gap(student, mixture)


def _gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``p (log p - log q)``, ``[R, C]`` like log p and log q; 0 if p is 0, also for log p = -inf."""
    probability = one.exp()
    return probability * (one - other).masked_fill(probability == 0, 0)


def _mixture(teacher: torch.Tensor, student: torch.Tensor, jsd_beta: float) -> torch.Tensor:
    """Return log m ``[R, C]`` of ``jsd`` from log-probabilities ``[R, C]``."""
    return torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))


def _slope(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    """Return ``q dD/dq`` ``[R, C]``, up to a constant times q, which has no effect through a softmax."""
    if kind == "forward_kl":
        return -teacher.exp()
    if kind == "reverse_kl":
        return _gap(student, teacher)
    return (1 - jsd_beta) * _gap(student, _mixture(teacher, student, jsd_beta))


def divergence_gradient_(
    student: torch.Tensor,
    teacher: Callable[[slice], torch.Tensor],
    kind: Divergence,
    *,
    jsd_beta: float = 0.5,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the divergences ``[R]`` in nats; turn the student's logits into each row's gradient of its divergence.

    With ``s_v = q_v dD/dq_v``, the gradient at a logit is ``s_v - q_v sum_u s_u``. No temporary is larger than
    :data:`ROWS` rows. The result is equal on all ranks of the group.

    Args:
        student: ``[R, Vl]`` logits, this rank's columns, in fp32 or wider.
        teacher: function that returns the teacher's logits in the same form, for a slice of at most :data:`ROWS` rows.
        kind: kind of divergence, and ``jsd_beta`` of ``jsd``, see ``distill``.
        group: tensor-parallel group over which the vocabulary is split, None if it is not.
    """
    found = student.new_empty(len(student))
    for block in slices(len(student), ROWS):
        own = student[block]
        other = teacher(block).to(own.dtype)
        sums = RowSums.empty(2, len(own), with_entropy=False, like=own)
        for side, logits in enumerate((other, own)):
            sums[side].set(softmax_sums(logits))
        sums = over_ranks(sums, group)
        p, q = sums[0].logprob(other), sums[1].logprob(own)
        slope = _slope(p, q, kind, jsd_beta)
        of_rows = torch.stack([_terms(p, q, kind, jsd_beta).sum(dim=1), slope.sum(dim=1)])
        if group is not None:
            dist.all_reduce(of_rows, group=group)
        found[block] = of_rows[0]
        own.copy_(slope.sub_(q.exp_().mul_(of_rows[1, :, None])))
    return found
