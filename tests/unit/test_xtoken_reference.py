"""The oracle of the losses reproduces the worked example, digit by digit."""

from __future__ import annotations

import pytest
import torch
from harness import xtoken_reference as reference
from harness.xtoken_reference import Chunk

# Two vocabularies, one text "a12b": the student has the tokens a, b, 12 and eos; the teacher a, b, 1, 2 and eos.
W = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 10 / 11, 1 / 11, 0], [0, 0, 0, 0, 1]], dtype=torch.float64)
STUDENT = torch.tensor(
    [[0.1, 0.2, 0.6, 0.1], [0.2, 0.5, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
).log()
TEACHER = torch.tensor(
    [[0.1, 0.2, 0.5, 0.1, 0.1], [0.05, 0.05, 0.1, 0.7, 0.1], [0.1, 0.6, 0.1, 0.1, 0.1], [0.2] * 5],
    dtype=torch.float64,
).log()
# The first token has no predictor, so neither has its chunk.
CHUNKS = (
    Chunk(student=(0,), teacher=(0, 1), student_tokens=(2,), teacher_tokens=(2, 3)),
    Chunk(student=(1,), teacher=(2,), student_tokens=(1,), teacher_tokens=(1,)),
)


def rows(chunk):
    return STUDENT[list(chunk.student)], TEACHER[list(chunk.teacher)]


@pytest.mark.parametrize(
    ("temperature", "k", "reverse", "terms", "loss"),
    [
        (1.0, 5, False, (0.124570, 0.150769), 0.137670),
        (1.0, 5, True, (0.573553, 0.125171), 0.349362),
        (1.0, 3, False, (0.159161, 0.141574), 0.150367),
        (2.0, 5, False, (0.263573, 0.198437), 0.924021),
    ],
)
def test_p_kl_of_the_example(temperature, k, reverse, terms, loss):
    columns = reference.top_columns(TEACHER, CHUNKS, k)
    found = [reference.p_kl(*rows(c), W, columns, temperature=temperature, reverse=reverse) for c in CHUNKS]
    assert [round(float(term), 6) for term in found] == list(terms)
    assert round(float(temperature**2 * sum(found) / 2), 6) == loss


@pytest.mark.parametrize(
    ("relaxed", "reverse", "kl", "l1", "loss"),
    [
        (False, False, (-0.093821, 0.040078), (0.335425, 0.1), 0.190841),
        (False, True, (0.173287, 0.047469), (0.335425, 0.1), 0.328090),
        (True, False, (-0.314530, -0.029237), (0.0, 0.0), -0.171883),
    ],
)
def test_gold_of_the_example(relaxed, reverse, kl, l1, loss):
    pairs = reference.exact_map(W, relaxed=relaxed)
    found = [reference.gold(*rows(c), pairs, reverse=reverse) for c in CHUNKS]
    assert [round(float(term), 6) for term, _ in found] == list(kl)
    assert [round(float(term), 6) for _, term in found] == list(l1)
    assert round(float(sum(map(sum, found)) / 2), 6) == loss


def test_likelihoods_of_the_example():
    # ALM is the KL of both likelihoods, .35 and .6, and more by the entropy of the teacher's.
    p = torch.tensor([0.35, 0.65], dtype=torch.float64)
    alm = reference.alm(*rows(CHUNKS[0]), CHUNKS[0])
    assert round(float(alm + (p * p.log()).sum()), 6) == 0.126931


def test_uld_of_the_example():
    student, teacher = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert round(float(reference.uld(student.double(), teacher.double())), 6) == 0.4


def test_a_mean_of_log_probabilities_may_make_a_term_negative():
    teacher = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64).log()
    student = torch.zeros(1, 2, dtype=torch.float64)
    found = reference.p_kl(student, teacher, torch.eye(2, dtype=torch.float64), torch.arange(2))
    assert round(float(found), 6) == -0.306495
