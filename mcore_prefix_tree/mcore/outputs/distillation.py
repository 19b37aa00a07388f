"""Readouts of a distillation by full vocabularies: the teacher's hidden states, and the student's divergence.

Legend: R rows (predictors with a row of the teacher's), h hidden size, Vl columns of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mcore_prefix_tree.logprob import Chunks, Head, head_logit_losses
from mcore_prefix_tree.logprob.edges import ROWS
from mcore_prefix_tree.mcore.outputs.readout import VocabularyReadout, gradient_and_values, with_gradient
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import Distillation, LossOutput, TeacherRows


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherHidden:
    """Hidden states and weights that give a teacher's logits of a micro-batch's predictors, without a gradient.

    Attributes:
        hidden: ``[R, h]``, the teacher's last hidden states.
        weight: ``[Vl, h]``, this rank's part of its output weight.
        head: other inputs of its logits.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    head: Head


@dataclass(frozen=True, kw_only=True)
class Hidden(VocabularyReadout[torch.Tensor]):
    """The last hidden states of the predictors, ``[R, h]``."""

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return ``hidden`` ``[R, h]``; ``weight`` is ``[Vl, h]``."""
        return hidden

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the packed hidden states ``[R, h]``."""
        return packed


@dataclass(frozen=True, kw_only=True)
class DivergenceLoss(VocabularyReadout[LossOutput]):
    """The divergence from a teacher over full vocabularies, which makes both models' logits a few rows at a time.

    The micro-batches have the objective's rows, and the teacher's hidden states as ``hook_data``.
    """

    objective: Distillation

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return ``[1 + R, 1]``, gradient and divergences, from ``hidden`` ``[R, h]`` and ``weight`` ``[Vl, h]``."""
        taught, rows = batch.hook_data, _rows(batch)
        assert isinstance(taught, TeacherHidden), "the teacher is asked before the student"
        teacher = Chunks(taught.hidden, taught.weight, replace(taught.head, head_chunk_rows=ROWS))

        def loss(chunk: slice, logits: torch.Tensor) -> torch.Tensor:
            """Return the divergences of a chunk's rows from logits ``[rows, Vl]``."""

            def of_teacher(block: slice) -> torch.Tensor:
                return teacher.logits(slice(chunk.start + block.start, chunk.start + block.stop))

            return self.objective.of_logits_(logits, of_teacher, rows.weight[chunk], group=taught.head.group)

        return with_gradient(*head_logit_losses(hidden, weight, head, loss=loss))

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of the packed ``[1 + R, 1]``."""
        gradient, of_row = gradient_and_values(packed)
        value = self.objective.weighed(of_row, _rows(batch))
        return replace(value, loss=value.loss + gradient)


def _rows(batch: MicroBatch) -> TeacherRows:
    assert isinstance(batch.rows, TeacherRows), "a distillation makes them"
    return batch.rows
