"""Distillation over full vocabularies that are split over tensor-parallel ranks in parts of different sizes."""

from __future__ import annotations

import pytest
import torch
from harness.losses import vocabulary_divergence
from harness.worlds import Layout, world
from megatron.core import parallel_state

VOCAB = 41
BORDERS = {1: (0, 41), 2: (0, 30, 41)}


def logits_of_both() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 4 * torch.randn(2, 9, VOCAB, generator=generator, dtype=torch.float64)


def divergence_and_gradient(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of some rows, and this rank's columns of its gradient."""
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    own = slice(BORDERS[size][rank], BORDERS[size][rank + 1])
    student, teacher = logits_of_both()[:, :, own]
    student = student.clone().requires_grad_()
    row = torch.tensor([8, 1, 2, 5])
    result = vocabulary_divergence(
        student, teacher, row, kind, jsd_beta=0.3, group=parallel_state.get_tensor_model_parallel_group()
    )
    weights = torch.tensor([1.0, 10.0, 100.0, 0.1], dtype=torch.float64)
    (grad,) = torch.autograd.grad(torch.dot(result, weights), student)
    return result.detach(), grad


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_vocabulary_parts_equal_the_full_vocabulary(kind):
    ((expected, wanted),) = world(1).run(divergence_and_gradient, kind, layout=Layout())
    results = world(2).run(divergence_and_gradient, kind, layout=Layout(tp=2))
    for divergence, _ in results:
        torch.testing.assert_close(divergence, expected, rtol=1e-12, atol=0)
    assert torch.equal(results[0][0], results[1][0])
    grad = torch.cat([part for _, part in results], dim=1)
    assert (grad - wanted).norm() <= 1e-12 * wanted.norm()
