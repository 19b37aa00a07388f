"""The chunk losses of the product on one rank, against the oracle and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.xtoken_problems import SETTINGS, expected, problem, product_terms
from harness.xtoken_reference import Chunk

from mcore_prefix_tree.objectives.divergence import divergence
from mcore_prefix_tree.xtoken.losses import LossSettings


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("limit", [3, 1000])
def test_terms_and_gradients_are_the_oracles(name, limit):
    task = problem()
    found = product_terms(task, SETTINGS[name], limit=limit)
    terms, grad_hidden, grad_weight = expected(task, SETTINGS[name])
    assert error(found.terms, terms) < 1e-12
    assert error(found.grad_hidden, grad_hidden) < 1e-12
    assert error(found.grad_weight, grad_weight) < 1e-12


@pytest.mark.parametrize("name", SETTINGS)
def test_padded_columns_change_nothing(name):
    task = problem()
    plain = product_terms(task, SETTINGS[name])
    padded = product_terms(task, SETTINGS[name], student_borders=(0, 40), teacher_borders=(0, 48))
    assert error(padded.terms, plain.terms) < 1e-14
    assert error(padded.grad_weight, plain.grad_weight) < 1e-14
    assert not padded.padding.any()


@pytest.mark.parametrize(("reverse", "kind"), [(False, "forward_kl"), (True, "reverse_kl")])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_one_vocabulary_is_plain_distillation(reverse, kind, temperature):
    """With W the identity and chunks of one token, P-KL is the divergence of ``distill``."""
    task = problem(teacher_size=29)
    chunks = [Chunk(student=(row,), teacher=(row,), student_tokens=(0,), teacher_tokens=(0,)) for row in (4, 0, 7)]
    task = replace(task, w=torch.eye(29, dtype=torch.float64), chunks=chunks, weight=task.weight[:3])
    found = product_terms(task, LossSettings(mode="p_kl", reverse=reverse, temperature=temperature))
    hidden, weight = (part.clone().requires_grad_() for part in task.student)
    rows = [chunk.student[0] for chunk in chunks]
    student, teacher = (
        torch.log_softmax(states[rows] @ matrix.t() / temperature, dim=1)
        for states, matrix in ((hidden, weight), task.teacher)
    )
    terms = temperature**2 * divergence(teacher, student, kind, 0.5)
    grads = torch.autograd.grad(torch.dot(terms, task.weight), (hidden, weight))
    assert error(found.terms, terms.detach()) < 1e-12
    assert error(found.grad_hidden, grads[0]) < 1e-12
    assert error(found.grad_weight, grads[1]) < 1e-12
