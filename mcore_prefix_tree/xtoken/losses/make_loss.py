"""Losses of chunks by name.

Legend: C chunks of a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.logprob.softmax import log1mexp
from mcore_prefix_tree.xtoken.losses.chunk_loss import ChunkLoss, Vocabularies, gathered, kl
from mcore_prefix_tree.xtoken.losses.collectives import group_size, log_softmax, sorted_over, sum_over
from mcore_prefix_tree.xtoken.losses.common_columns import CommonColumns, common_tokens
from mcore_prefix_tree.xtoken.losses.p_kl import ProjectedKL
from mcore_prefix_tree.xtoken.losses.row_blocks import Block
from mcore_prefix_tree.xtoken.modes import LossSettings


class LikelihoodMatching:
    """ALM of realised chunks, without a projection; ``theta`` is the temperature of the likelihoods."""

    def __init__(self, vocabularies: Vocabularies, *, theta: float = 1.0) -> None:
        self._vocabularies, self._theta = vocabularies, theta

    def shares(self, student: torch.Tensor, teacher: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the terms' shares ``[C]`` from logits ``[A, Vl]`` and ``[B, Wl]``; see :meth:`ChunkLoss.shares`."""
        both, group = self._vocabularies, self._vocabularies.group
        found = []
        for logits, side, part in ((student, block.student, both.student), (teacher, block.teacher, both.teacher)):
            if side.realised is None:
                realised = sum_over(gathered(log_softmax(logits, group), side.row, side.token, part), group)
            else:
                realised = side.realised.to(logits.dtype)
            found.append(side.sum(realised))
        # The binary cross-entropy of the chunks' likelihoods.
        model, target = (logprob / self._theta for logprob in found)
        return -(target.exp() * model - torch.expm1(target) * log1mexp(model)) / group_size(group)


class Gold:
    """KL over common tokens, in reverse if set, and L1 over sorted tails of at most ``tail`` tokens.

    ``relaxed`` is the rule of :func:`~mcore_prefix_tree.xtoken.losses.common_columns.common_tokens`; True is H-KL.
    """

    def __init__(self, vocabularies: Vocabularies, *, relaxed: bool, reverse: bool = False, tail: int = 8192) -> None:
        assert vocabularies.projection is not None, "gold reads a projection"
        tokens = common_tokens(vocabularies.projection, relaxed=relaxed)
        self._common = CommonColumns(vocabularies.student, vocabularies.teacher, tokens, vocabularies.device)
        self._group, self._reverse = vocabularies.group, reverse
        self._tail = min(*self._common.left, tail)

    def shares(self, student: torch.Tensor, teacher: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the terms' shares ``[C]`` from logits ``[A, Vl]`` and ``[B, Wl]``; see :meth:`ChunkLoss.shares`."""
        a = block.student.mean(log_softmax(student, self._group))
        b = block.teacher.mean(log_softmax(teacher, self._group))
        model, target = self._common.paired(a, b)
        found = kl(target, model, reverse=self._reverse)
        if not self._tail:
            return found
        tails = [
            sorted_over(side.exp(), self._tail, widths, self._group)
            for side, widths in zip(self._common.unpaired(a, b), self._common.left_widths, strict=True)
        ]
        return found + (tails[0] - tails[1]).abs().sum(dim=1)


class UniversalLogits:
    """ULD over both full vocabularies; it reads no projection."""

    def __init__(self, vocabularies: Vocabularies) -> None:
        self._vocabularies, self._group = vocabularies, vocabularies.group
        self._size = max(vocabularies.student.size, vocabularies.teacher.size)

    def shares(self, student: torch.Tensor, teacher: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the terms' shares ``[C]`` from logits ``[A, Vl]`` and ``[B, Wl]``; see :meth:`ChunkLoss.shares`."""
        sides = [
            sorted_over(side.mean(log_softmax(logits, self._group).exp()), self._size, part.widths, self._group)
            for side, logits, part in (
                (block.student, student, self._vocabularies.student),
                (block.teacher, teacher, self._vocabularies.teacher),
            )
        ]
        return (sides[0] - sides[1]).abs().sum(dim=1)


def make_loss(
    settings: LossSettings, vocabularies: Vocabularies, *, columns: npt.NDArray[np.int64] | None = None
) -> ChunkLoss:
    """Return a loss; P-KL compares ``columns``, int64 ids ascending, None for all."""
    if settings.mode == "p_kl":
        return ProjectedKL(vocabularies, columns, reverse=settings.reverse, named=settings.exported)
    if settings.mode in ("gold", "h_kl"):
        relaxed = settings.mode == "h_kl"
        return Gold(vocabularies, relaxed=relaxed, reverse=settings.reverse, tail=settings.tail)
    if settings.mode == "alm":
        return LikelihoodMatching(vocabularies, theta=settings.theta)
    return UniversalLogits(vocabularies)
