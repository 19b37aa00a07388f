"""Losses of chunks at the vocabulary heads: both models' logits exist for a block of chunks at a time.

Legend: A and B rows of a block, Vl and Wl columns on this rank, padding included, C chunks of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob import BlockLoss, Head
from mcore_prefix_tree.logprob import Chunks as HeadChunks
from mcore_prefix_tree.xtoken.losses.chunk_loss import ChunkLoss, Vocabularies
from mcore_prefix_tree.xtoken.losses.common_columns import Part
from mcore_prefix_tree.xtoken.losses.row_blocks import Block

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
