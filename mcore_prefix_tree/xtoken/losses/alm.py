"""ALM: the chunk's likelihoods as a yes or no (approximate likelihood matching, Minixhofer et al., 2025).

With l the log-probability of the chunk's tokens and ``P = e^(l / theta)`` of either side, the binary cross-entropy
``-[P_T log P_S + (1 - P_T) log(1 - P_S)]``. A token's rank sends one number.
"""

from __future__ import annotations

import torch

from mcore_prefix_tree.logprob.log1mexp import log1mexp
from mcore_prefix_tree.xtoken.losses.chunk_loss import Vocabularies, gathered
from mcore_prefix_tree.xtoken.losses.collectives import log_softmax, size_of, sum_over
from mcore_prefix_tree.xtoken.losses.row_blocks import Block


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
        return binary_cross_entropy(*found, theta=self._theta) / size_of(group)


def binary_cross_entropy(student: torch.Tensor, teacher: torch.Tensor, *, theta: float) -> torch.Tensor:
    """Return ALM's terms ``[C]`` from both sides' log-probabilities of the chunks."""
    model, target = student / theta, teacher / theta
    return -(target.exp() * model - torch.expm1(target) * log1mexp(model))
