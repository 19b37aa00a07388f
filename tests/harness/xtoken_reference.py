"""The losses of cross-tokenizer distillation, chunk by chunk on full vocabularies: the oracle of the tests.

Every function returns the term of one chunk, differentiable in both models' logits. A chunk's rows are its predictors.

Legend: A student predictors, B teacher predictors, V_s and V_t vocabularies, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOOR = 1e-10
Tokens = Sequence[bytes | None]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk: the rows that predict its tokens, and these tokens, of both sides."""

    student: tuple[int, ...]
    teacher: tuple[int, ...]
    student_tokens: tuple[int, ...]
    teacher_tokens: tuple[int, ...]


def top_columns(teacher: torch.Tensor, chunks: Sequence[Chunk], k: int) -> torch.Tensor:
    """The k columns with the largest logit after any predictor of these chunks."""
    rows = sorted({row for chunk in chunks for row in chunk.teacher})
    return teacher[rows].amax(dim=0).topk(k).indices.sort().values


def p_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    columns: torch.Tensor,
    *,
    temperature: float = 1.0,
    reverse: bool = False,
) -> torch.Tensor:
    """P-KL of one chunk from ``[A, V_s]`` and ``[B, V_t]`` logits and W ``[V_s, V_t]``, over the given columns."""
    projected = (torch.softmax(student / temperature, dim=1) @ weights)[:, columns].mean(dim=0)
    a = (projected / projected.sum().clamp(min=FLOOR)).clamp(min=FLOOR).log()
    b = torch.log_softmax(teacher[:, columns] / temperature, dim=1).mean(dim=0)
    return (a.exp() * (a - b)).sum() if reverse else (b.exp() * (b - a)).sum()


def exact_map(weights: torch.Tensor, *, relaxed: bool) -> list[tuple[int, int]]:
    """Pairs (student's id, teacher's id) of the same token, from W."""
    winners: dict[int, tuple[float, int]] = {}
    for s, row in enumerate(weights.tolist()):
        top = max(row)
        if top < (0.6 if relaxed else 1.0):
            continue
        t = row.index(top)
        if t not in winners or (relaxed and top > winners[t][0]):
            winners[t] = (top, s)
    return sorted((s, t) for t, (_, s) in winners.items())


def gold(
    student: torch.Tensor,
    teacher: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    tail: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL over the common columns and the L1 of the sorted tails, of one chunk."""
    a = torch.log_softmax(student / temperature, dim=1).mean(dim=0)
    b = torch.log_softmax(teacher / temperature, dim=1).mean(dim=0)
    of_student, of_teacher = [s for s, _ in pairs], [t for _, t in pairs]
    p, q = a[of_student], b[of_teacher]
    kl = (p.exp() * (p - q)).sum() if reverse else (q.exp() * (q - p)).sum()
    left = [a[[s for s in range(len(a)) if s not in of_student]], b[[t for t in range(len(b)) if t not in of_teacher]]]
    size = min(*map(len, left), tail)
    sorted_left = [values.exp().sort(descending=True).values[:size] for values in left]
    return kl, (sorted_left[0] - sorted_left[1]).abs().sum()


def alm(student: torch.Tensor, teacher: torch.Tensor, chunk: Chunk, *, theta: float = 1.0) -> torch.Tensor:
    """The binary cross-entropy of the chunk's likelihoods."""
    likelihoods = []
    for logits, tokens in ((student, chunk.student_tokens), (teacher, chunk.teacher_tokens)):
        chosen = torch.log_softmax(logits, dim=1)[range(len(tokens)), list(tokens)]
        likelihoods.append((chosen.sum() / theta).exp())
    p_s, p_t = likelihoods
    return -(p_t * p_s.log() + (1 - p_t) * (1 - p_s).log())


def uld(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The L1 distance of the chunk's sorted mean probabilities, zero-padded."""
    size = max(student.shape[1], teacher.shape[1])
    p, q = (torch.softmax(logits, dim=1).mean(dim=0).sort(descending=True).values for logits in (student, teacher))
    p, q = (torch.nn.functional.pad(side, (0, size - len(side))) for side in (p, q))
    return (p - q).abs().sum()
