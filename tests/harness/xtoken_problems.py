"""Random problems of cross-tokenizer distillation, and the chunk losses of the product on them.

A problem has two vocabularies that share some tokens, a projection, both models' hidden states and output weights, and
chunks of every kind, some of which read the same rows. Everything is small, in float64 and made from a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness import xtoken_reference as reference
from harness.xtoken_reference import Chunk
from mcore_prefix_tree.logprob import Edges, Head, head_block_losses
from mcore_prefix_tree.xtoken.fold import Chunks, Side
from mcore_prefix_tree.xtoken.losses import (
    ChunkTerms,
    LossSettings,
    Part,
    Vocabularies,
    block_loss,
    cut_blocks,
    largest_logits,
    make_loss,
    ordered,
    teacher_logits,
    top_columns,
)
from mcore_prefix_tree.xtoken.projection import Projection

HIDDEN = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """All inputs of a loss, unsplit: hidden states ``[R, h]`` and weight ``[V, h]`` of both, chunks in any order."""

    student: tuple[torch.Tensor, torch.Tensor]
    teacher: tuple[torch.Tensor, torch.Tensor]
    w: torch.Tensor
    student_bytes: list[bytes | None]
    teacher_bytes: list[bytes | None]
    chunks: list[Chunk]
    weight: torch.Tensor


def projection_of(w: torch.Tensor) -> Projection:
    """Return W as the sparse rows that files have."""
    weights, columns = w.sort(dim=1, descending=True, stable=True)
    return Projection(
        columns=torch.where(weights > 0, columns, -1).numpy().astype(np.int32),
        weights=weights.numpy().astype(np.float32),
        teacher_vocab_size=w.shape[1],
    )


def side_of(rows: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Side:
    """Return one model's predictors and tokens of some chunks."""
    return Side(
        rows=np.concatenate([np.asarray(one, dtype=np.int64) for one in rows]),
        tokens=np.concatenate([np.asarray(one, dtype=np.int32) for one in tokens]),
        starts=np.cumsum([0, *map(len, rows)]),
    )


def chunks_of(chunks: Sequence[Chunk], weight: torch.Tensor) -> Chunks:
    """Return chunks as the losses take them."""
    return Chunks(
        student=side_of([c.student for c in chunks], [c.student_tokens for c in chunks]),
        teacher=side_of([c.teacher for c in chunks], [c.teacher_tokens for c in chunks]),
        weight=weight.numpy(),
        multiplicity=np.ones(len(chunks)),
        first_sample=np.zeros(len(chunks), dtype=np.int64),
    )


def problem(seed: int = 0, *, student_size: int = 29, teacher_size: int = 37) -> Problem:
    """Return a random problem, whose probabilities are spread out enough to have no ties."""
    rng = np.random.default_rng(seed)
    letters = [bytes([97 + i]) for i in range(12)]
    pairs = [a + b for a in letters for b in letters]
    rng.shuffle(pairs)
    student_bytes: list[bytes | None] = [*letters, *pairs[: student_size - 13], None]
    teacher_bytes: list[bytes | None] = [*letters, *pairs[5 : teacher_size - 13 + 5], None]
    ids = {text: token for token, text in enumerate(teacher_bytes)}
    w = torch.zeros(student_size, teacher_size, dtype=torch.float64)
    for token, text in enumerate(student_bytes):
        if text in ids:
            w[token, ids[text]] = 1
        elif token % 2 and text is not None:
            w[token, [ids[text[:1]], ids[text[1:]]]] = torch.tensor([0.75, 0.25], dtype=torch.float64)
        elif text is not None:
            w[token, [ids[text[:1]], ids[text[1:]], ids[None]]] = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    chunks = []
    for number in range(17):
        lens = [(1, 1), (1, 2), (2, 1), (2, 3), (1, 1), (3, 2)][number % 6]
        tokens = [rng.integers(0, 12, size=n).tolist() for n in lens]
        if lens == (1, 1):
            tokens[1] = list(tokens[0])
        rows = [sorted(rng.choice(9, size=n, replace=False).tolist()) for n in lens]
        chunks.append(
            Chunk(
                student=tuple(rows[0]),
                teacher=tuple(rows[1]),
                student_tokens=tuple(tokens[0]),
                teacher_tokens=tuple(tokens[1]),
            )
        )
    generator = torch.Generator().manual_seed(seed)

    def model(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64) for n in (9, size))  # type: ignore[return-value]

    return Problem(
        student=model(student_size),
        teacher=model(teacher_size),
        w=w,
        student_bytes=student_bytes,
        teacher_bytes=teacher_bytes,
        chunks=chunks,
        weight=torch.rand(len(chunks), generator=generator, dtype=torch.float64) + 0.5,
    )


def reference_terms(
    task: Problem, settings: LossSettings, student: torch.Tensor, teacher: torch.Tensor
) -> torch.Tensor:
    """Return ``[C]`` terms by the oracle, from full logits of all rows."""
    t, columns = settings.temperature, torch.arange(teacher.shape[1])
    if settings.top_k is not None:
        columns = reference.top_columns(teacher, task.chunks, settings.top_k)
    pairs = reference.exact_map(task.w, relaxed=settings.mode == "h_kl")
    terms = []
    for chunk in task.chunks:
        x, z = student[list(chunk.student)], teacher[list(chunk.teacher)]
        if settings.mode == "p_kl":
            if settings.exported:
                columns = z.isfinite().all(dim=0).nonzero().flatten()
            term = reference.p_kl(x, z, task.w, columns, temperature=t, reverse=settings.reverse)
        elif settings.mode in ("gold", "h_kl"):
            both = reference.gold(x, z, pairs, temperature=t, reverse=settings.reverse, tail=settings.tail)
            term = both[0] + both[1]
        elif settings.mode == "alm":
            term = reference.alm(x, z, chunk, theta=settings.theta)
        else:
            term = reference.uld(x, z)
        terms.append(term * t**2)
    return torch.stack(terms)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The product's results on one rank: terms ``[C]`` in the order of the chunks, gradients of its columns."""

    terms: torch.Tensor
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor
    padding: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def head_of(rows: int, start: int, group: dist.ProcessGroup | None) -> Head:
    """Return a head over so many rows; their tokens do not matter."""
    edges = Edges.of_candidates(np.arange(rows), np.zeros((rows, 1), dtype=np.int64), padded_size=rows)
    return Head(edges=edges, vocab_start=start, group=group)


def product_terms(
    task: Problem,
    settings: LossSettings,
    *,
    student_borders: tuple[int, ...] | None = None,
    teacher_borders: tuple[int, ...] | None = None,
    group: dist.ProcessGroup | None = None,
    limit: int = 4,
    watch: AbstractContextManager[Any] | None = None,
) -> Found:
    """Run the product on this rank's columns; borders beyond a vocabulary make padded columns of large logits.

    ``watch`` is entered around the heads, once the projection and the columns of P-KL are there.
    """
    rank = 0 if group is None else dist.get_rank(group)
    parts, weights = [], []
    for (_, weight), borders in ((task.student, student_borders), (task.teacher, teacher_borders)):
        part = Part(size=len(weight), borders=borders or (0, len(weight)), group=group)
        padded = torch.cat([weight, weight.new_full((part.borders[-1] - len(weight), weight.shape[1]), 3.0)])
        parts.append(part)
        weights.append(padded[part.borders[rank] : part.borders[rank + 1]].clone())
    vocabularies = Vocabularies(
        student=parts[0], teacher=parts[1], projection=projection_of(task.w), device=torch.device("cpu")
    )
    rows = [np.arange(len(side[0])) for side in (task.student, task.teacher)]
    order = ordered(chunks_of(task.chunks, torch.arange(len(task.chunks), dtype=torch.float64))).weight.astype(np.int64)
    blocks = cut_blocks(
        ordered(chunks_of(task.chunks, task.weight)),
        student_rows=rows[0],
        teacher_rows=rows[1],
        student_limit=limit,
        teacher_limit=limit,
    )
    teacher_head = head_of(len(rows[1]), parts[1].borders[rank], group)
    asked = teacher_logits(task.teacher[0], weights[1], teacher_head, blocks)
    columns = None
    if settings.mode == "p_kl" and settings.top_k is not None:
        maxima = torch.stack([largest_logits(asked(block.teacher.rows), parts[1]) for block in blocks]).amax(dim=0)
        columns = top_columns(maxima, settings.top_k, parts[1])
    terms = ChunkTerms(
        loss=make_loss(settings, vocabularies, columns=columns),
        temperature=settings.temperature,
        scale=settings.scale,
    )
    hidden, weight = task.student[0].clone().requires_grad_(), weights[0].requires_grad_()
    with watch or nullcontext():
        gradient, values = head_block_losses(
            hidden,
            weight,
            head_of(len(rows[0]), parts[0].borders[rank], group),
            blocks=[block.student.rows for block in blocks],
            loss=block_loss(terms, vocabularies, blocks, asked),
        )
        grad_hidden, grad_weight = torch.autograd.grad(gradient, (hidden, weight))
    if group is not None:
        dist.all_reduce(grad_hidden, group=group)
    found = torch.empty_like(values)
    found[torch.from_numpy(order)] = values
    width = parts[0].width
    return Found(
        terms=found, grad_hidden=grad_hidden, grad_weight=grad_weight[:width], padding=grad_weight[width:].clone()
    )


def expected(task: Problem, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the oracle's terms ``[C]`` and the gradients of hidden states and weight of their weighted sum."""
    hidden, weight = (part.clone().requires_grad_() for part in task.student)
    terms = reference_terms(task, settings, hidden @ weight.t(), task.teacher[0] @ task.teacher[1].t())
    grad_hidden, grad_weight = torch.autograd.grad(torch.dot(terms, task.weight), (hidden, weight))
    return terms.detach(), grad_hidden, grad_weight


SETTINGS = {
    "p_kl": LossSettings(mode="p_kl", temperature=1.5),
    "p_kl top-7": LossSettings(mode="p_kl", top_k=7),
    "p_kl reverse": LossSettings(mode="p_kl", reverse=True),
    "gold": LossSettings(mode="gold", temperature=2.0),
    "gold reverse, tail 3": LossSettings(mode="gold", reverse=True, tail=3),
    "h_kl": LossSettings(mode="h_kl"),
    "alm": LossSettings(mode="alm"),
    "alm tempered": LossSettings(mode="alm", theta=2.5),
    "uld": LossSettings(mode="uld"),
}
