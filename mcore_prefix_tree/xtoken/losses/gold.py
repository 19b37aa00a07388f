"""Gold and H-KL: the KL of common tokens, and the distance of the sorted probabilities of the others.

With a and b the chunk's means of log-probabilities of the student and the teacher: ``sum e^b (b - a)`` over the tokens
that both vocabularies have, or in reverse ``sum e^a (a - b)``; plus the L1 distance of the largest m of the other
tokens' ``e^a`` and ``e^b``, each side sorted. H-KL also takes tokens as common that W maps for the most part.
"""

from __future__ import annotations

import torch

from mcore_prefix_tree.xtoken.losses.chunk_loss import Vocabularies, kl
from mcore_prefix_tree.xtoken.losses.collectives import log_softmax, sorted_over
from mcore_prefix_tree.xtoken.losses.common_columns import CommonColumns, common_tokens
from mcore_prefix_tree.xtoken.losses.row_blocks import Block


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
