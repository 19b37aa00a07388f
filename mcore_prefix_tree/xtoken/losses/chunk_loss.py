"""The protocol of a loss of chunks, and functions that several losses use.

Legend: C chunks of a block, A and B rows of the student and the teacher, Vl and Wl their columns on this rank without
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob import BlockLoss, Head
from mcore_prefix_tree.logprob import Chunks as HeadChunks
from mcore_prefix_tree.xtoken.losses.collectives import Group
from mcore_prefix_tree.xtoken.losses.common_columns import Part
from mcore_prefix_tree.xtoken.losses.row_blocks import Block
from mcore_prefix_tree.xtoken.projection import Projection

# Smaller probabilities count as this: a column that no token of the student projects to would have infinite cost.
FLOOR = 1e-10


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabularies:
    """Vocabularies of a loss on this rank, the same for all steps; ``projection`` is None for losses that read none."""

    student: Part
    teacher: Part
    projection: Projection | None
    device: torch.device

    @property
    def group(self) -> Group:
        return self.student.group


class ChunkLoss(Protocol):
    """Terms of chunks, from the logits of a block."""

    def shares(self, student: torch.Tensor, teacher: torch.Tensor, block: Block) -> torch.Tensor:
        """Return this rank's shares ``[C]`` of the terms, which are their sums over ranks.

        ``student`` and ``teacher`` are logits ``[A, Vl]`` and ``[B, Wl]`` of the block's rows, divided by the
        temperature.
        """


def kl(target: torch.Tensor, model: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Return ``sum_v p (log p - log q)`` ``[C]`` from ``[C, n]`` log-probabilities; p is the target, in reverse q."""
    p, q = (model, target) if reverse else (target, model)
    return (p.exp() * (p - q)).sum(dim=1)


def gathered(logprobs: torch.Tensor, row: torch.Tensor, token: torch.Tensor, part: Part) -> torch.Tensor:
    """Return ``[n]``, the log-probability of a token after each of some rows; 0 on ranks that do not have the token."""
    column = token - part.start
    here = (column >= 0) & (column < part.width)
    if not part.width:
        # A 0 that autograd goes through: all ranks take part in backward's collectives.
        return logprobs.sum().expand(len(row))
    return torch.where(here, logprobs[row, column.clamp(0, part.width - 1)], 0)


# From indices of the teacher's rows, their logits [B, Wl] in fp32 or wider, in memory that the next call reuses.
TeacherLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTerms:
    """A loss with the temperature, the divisor of both models' logits, and the scale, a factor on every term."""

    loss: ChunkLoss
    temperature: float = 1.0
    scale: float = 1.0


def block_loss(
    terms: ChunkTerms,
    vocabularies: Vocabularies,
    blocks: Sequence[Block],
    teacher: TeacherLogits,
    *,
    factor: float = 1.0,
) -> BlockLoss:
    """Return the loss that :func:`~mcore_prefix_tree.logprob.head_block_losses` takes.

    From a block's number and logits ``[A, Vl]`` it computes the terms ``[C]`` and, if gradients are enabled, the
    gradient of their weighted sum, times ``factor``, at the logits. Ranks call it together.
    """
    student_width, teacher_width = vocabularies.student.width, vocabularies.teacher.width

    def loss(number: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        block, with_grad = blocks[number], torch.is_grad_enabled()
        leaf = logits.detach().requires_grad_(with_grad)
        with torch.no_grad():
            target = teacher(block.teacher.rows).to(logits.dtype)[:, :teacher_width] / terms.temperature
        shares = terms.loss.shares(leaf[:, :student_width] / terms.temperature, target, block) * terms.scale
        grad = None
        if with_grad:
            (grad,) = torch.autograd.grad(torch.dot(shares, factor * block.weight.to(shares.dtype)), leaf)
        found = shares.detach().clone()
        if vocabularies.group is not None:
            dist.all_reduce(found, group=vocabularies.group)
        return found, grad

    return loss


def teacher_logits(hidden: torch.Tensor, weight: torch.Tensor, head: Head, blocks: Sequence[Block]) -> TeacherLogits:
    """Return the teacher's logits of a block's rows, from its hidden states ``[R, h]`` and its weight ``[Wl, h]``."""
    largest = max((len(block.teacher.rows) for block in blocks), default=1)
    return HeadChunks(hidden, weight, replace(head, head_chunk_rows=largest)).logits


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownRows:
    """A teacher's likeliest tokens, int64 ``[R, k]``, and their log-probabilities in nats, ``[R, k]``."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor

    def logits(self, part: Part) -> TeacherLogits:
        """Return the logits ``[B, Wl]`` of a block's rows; -inf for tokens that a row does not name."""

        def of_rows(rows: torch.Tensor) -> torch.Tensor:
            column = self.token_ids[rows] - part.start
            column = column.where((column >= 0) & (column < part.width), part.width)  # other ranks' tokens
            logits = self.logprobs.new_full((len(rows), part.width + 1), -torch.inf)
            return logits.scatter_(1, column, self.logprobs[rows])[:, :-1]

        return of_rows


def largest_logits(logits: torch.Tensor, part: Part) -> torch.Tensor:
    """Return ``[Wl]``, the largest of some rows' logits ``[B, Wl]`` in each column that is not padding."""
    return logits[:, : part.width].amax(dim=0)
