"""Values of losses for tests: a divergence as a differentiable function of logits, and means of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.objectives.divergence import divergence_gradient_
from mcore_prefix_tree.utils.choices import Divergence


def divided(means: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Divide the sums of ``LossOutput.metrics`` by their weights; skip those without weight."""
    values = {name: pair.tolist() for name, pair in means.items()}
    return {name: total / weight for name, (total, weight) in values.items() if weight}


def vocabulary_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    row: torch.Tensor,
    kind: Divergence,
    *,
    jsd_beta: float = 0.5,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """``[R]``: ``divergence_gradient_`` of some rows of ``[P, Vl]`` logits, with the gradient it forms for autograd."""
    result: torch.Tensor = _Divergence.apply(student, teacher, row, kind, jsd_beta, group)  # type: ignore[no-untyped-call]
    return result


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Any, teacher: Any, row: Any, kind: Any, jsd_beta: Any, group: Any) -> torch.Tensor:
        logits = student[row].to(torch.promote_types(student.dtype, torch.float32))
        values = divergence_gradient_(logits, lambda rows: teacher[row[rows]], kind, jsd_beta=jsd_beta, group=group)
        ctx.save_for_backward(student, row, logits)
        return values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        student, row, of_logits = ctx.saved_tensors
        grad = torch.zeros_like(student)
        grad[row] = (of_logits * grad_outputs[0][:, None]).to(grad.dtype)
        return grad, None, None, None, None, None
