"""ULD: the L1 distance of sorted probabilities, whichever tokens they are of (Boizard et al., 2024, arXiv:2402.12030).

The probabilities of a chunk are the means over its predictors. The shorter vocabulary is padded with zeros.
"""

from __future__ import annotations

import torch

from mcore_prefix_tree.xtoken.losses.chunk_loss import Vocabularies
from mcore_prefix_tree.xtoken.losses.collectives import log_softmax, sorted_over
from mcore_prefix_tree.xtoken.losses.row_blocks import Block


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
