"""The protocol of a loss of chunks, and functions that several losses use.

Legend: C chunks of a block, A and B rows of the student and the teacher, Vl and Wl their columns on this rank without
padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

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
