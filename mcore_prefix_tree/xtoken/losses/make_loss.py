"""Losses of chunks by name.

Legend: C chunks of a block, D of these of one token on both sides, O outcomes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.logprob.log1mexp import log1mexp
from mcore_prefix_tree.xtoken.losses.chunk_loss import FLOOR, ChunkLoss, Vocabularies, gathered, kl
from mcore_prefix_tree.xtoken.losses.collectives import group_size, log_softmax, sorted_over, sum_over
from mcore_prefix_tree.xtoken.losses.common_columns import CommonColumns, Part, common_tokens
from mcore_prefix_tree.xtoken.losses.outcomes import Outcomes
from mcore_prefix_tree.xtoken.losses.p_kl import ProjectedKL
from mcore_prefix_tree.xtoken.losses.row_blocks import Block, BlockSide
from mcore_prefix_tree.xtoken.modes import LossSettings


class PartitionKL:
    """A proper KL over outcomes that both vocabularies can tell apart, and one more, REST, which has the rest of 1.

    If a chunk has one token on both sides, its outcomes are the common tokens, by the strict map of the projection. If
    one side has several tokens, they are the ends that complete the prefix which is realised to the same bytes on both
    sides: after "1" of "1|2", the student's token "12" is the teacher's "2". If both have several, the outcome is the
    chunk itself.
    """

    def __init__(self, vocabularies: Vocabularies) -> None:
        assert vocabularies.projection is not None, "partition-KL reads a projection"
        tokens = common_tokens(vocabularies.projection, relaxed=False)
        self._vocabularies = vocabularies
        self._common = CommonColumns(vocabularies.student, vocabularies.teacher, tokens, vocabularies.device)

    def shares(self, student: torch.Tensor, teacher: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the terms' shares ``[C]`` from logits ``[A, Vl]`` and ``[B, Wl]``; see :meth:`ChunkLoss.shares`."""
        assert block.outcomes is not None, "found with the block"
        group = self._vocabularies.group
        a, b = log_softmax(student, group), log_softmax(teacher, group)
        found = self._of_several(a, b, block, block.outcomes)
        single = block.outcomes.single
        if not len(single):
            return found
        return found.index_add(0, single, self._of_single(a, b, block, single))

    def _of_single(self, a: torch.Tensor, b: torch.Tensor, block: Block, single: torch.Tensor) -> torch.Tensor:
        """Return shares ``[D]`` of chunks of one token on both sides."""
        group = self._vocabularies.group
        a, b = (logprobs[side.row[side.last[single]]] for logprobs, side in ((a, block.student), (b, block.teacher)))
        model, target = self._common.paired(a, b)
        # The rest is added up instead of subtracted from 1: it keeps its digits however small it is.
        rest = torch.stack([left.exp().sum(dim=1) for left in self._common.unpaired(a, b)])
        p, q = sum_over(rest, group).clamp(min=FLOOR).log()
        of_rest: torch.Tensor = q.exp() * (q - p) / group_size(group)
        return kl(target, model, reverse=False) + of_rest

    def _of_several(self, a: torch.Tensor, b: torch.Tensor, block: Block, outcomes: Outcomes) -> torch.Tensor:
        """Return shares ``[C]``, 0 for chunks of one token on both sides."""
        both = self._vocabularies
        known = [
            self._log_outcomes(logprobs, side, outcomes.chunk, end, part)
            for logprobs, side, end, part in (
                (a, block.student, outcomes.student, both.student),
                (b, block.teacher, outcomes.teacher, both.teacher),
            )
        ]
        zero = a.new_zeros(len(block.weight))
        rest = [(1 - zero.index_add(0, outcomes.chunk, side.exp())).clamp(min=FLOOR).log() for side in known]
        terms = known[1].exp() * (known[1] - known[0])
        # A chunk without outcomes is all REST on both sides, which cannot be told apart: 0.
        return (zero.index_add(0, outcomes.chunk, terms) + rest[1].exp() * (rest[1] - rest[0])) / group_size(both.group)

    def _log_outcomes(
        self, logprobs: torch.Tensor, side: BlockSide, chunk: torch.Tensor, end: torch.Tensor, part: Part
    ) -> torch.Tensor:
        """Return ``[O]``: the log-probability of the chunk's tokens before the last, and of each end after them."""
        is_last = torch.zeros_like(side.row, dtype=torch.bool).index_fill(0, side.last, True)
        realised = gathered(logprobs, side.row, side.token, part).masked_fill(is_last, 0)
        ends = gathered(logprobs, side.row[side.last[chunk]], end, part)
        found = sum_over(torch.cat([realised, ends]), part.group)
        return side.sum(found[: len(realised)])[chunk] + found[len(realised) :]


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
    if settings.mode == "partition_kl":
        return PartitionKL(vocabularies)
    if settings.mode == "alm":
        return LikelihoodMatching(vocabularies, theta=settings.theta)
    return UniversalLogits(vocabularies)
