"""Partition-KL: a proper KL over outcomes that both vocabularies can tell apart, and one more, REST.

If a chunk has one token on both sides, its outcomes are the common tokens. If one side has several tokens, they are the
ends that complete the prefix which is realised to the same bytes on both sides: after "1" of "1|2", the student's token
"12" is the teacher's "2". If both have several, the outcome is the chunk itself. REST has the rest of 1.

Legend: C chunks of a block, D of these of one token on both sides, O outcomes.
"""

from __future__ import annotations

import torch

from mcore_prefix_tree.xtoken.losses.chunk_loss import FLOOR, Vocabularies, gathered, kl
from mcore_prefix_tree.xtoken.losses.collectives import group_size, log_softmax, sum_over
from mcore_prefix_tree.xtoken.losses.common_columns import CommonColumns, Part, common_tokens
from mcore_prefix_tree.xtoken.losses.outcomes import Outcomes
from mcore_prefix_tree.xtoken.losses.row_blocks import Block, BlockSide


class PartitionKL:
    """Partition-KL; the strict map of the vocabularies' projection gives the common tokens."""

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
