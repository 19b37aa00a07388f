"""Readouts of distillations: a teacher's hidden states, and the student's divergence by full vocabularies or by chunks.

Legend: R rows (predictors with a row of the teacher's, or of scored tokens), m rows of other parts of a tree, h hidden
size, Vl columns of the vocabulary on this rank, C chunks, N packed values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mcore_prefix_tree.logprob import Chunks, Head, head_block_losses, head_logit_losses, head_weighted_sum
from mcore_prefix_tree.logprob.edges import ROWS
from mcore_prefix_tree.mcore.outputs.readout import VocabularyReadout, gradient_and_values, with_gradient
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import BoundCrossTokenizer, ChunkRows, Distillation, LossOutput, TeacherRows
from mcore_prefix_tree.objectives.cross_tokenizer_rows import TaughtChunks
from mcore_prefix_tree.xtoken.losses import ChunkTerms, Vocabularies, block_loss, teacher_logits
from mcore_prefix_tree.xtoken.losses.chunk_loss import TeacherLogits


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherHidden:
    """Hidden states and weights that give a teacher's logits of a micro-batch's predictors, without a gradient."""

    hidden: torch.Tensor  # [R, h], the teacher's last hidden states
    weight: torch.Tensor  # [Vl, h], this rank's part of its output weight
    head: Head  # other inputs of its logits


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


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLesson:
    """Predictions of a teacher with another tokenizer for a micro-batch's chunks."""

    taught_by: TeacherHidden | None  # hidden states of the teacher; None if the samples bring the teacher's rows
    terms: ChunkTerms
    vocabularies: Vocabularies
    number: int  # index of the teacher among the objective's
    factor: float  # factor on the weighted sum of the terms


@dataclass(frozen=True, kw_only=True)
class ChunkLosses(VocabularyReadout[LossOutput]):
    """The losses of chunks, which make both models' logits a block of chunks at a time.

    The micro-batches have the objective's rows, and the teachers' lessons as ``hook_data``.
    """

    objective: BoundCrossTokenizer

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return gradient, then values ``[N, 1]``, from ``hidden`` ``[R + m, h]`` and ``weight`` ``[Vl, h]``."""
        lessons: tuple[ChunkLesson, ...] = batch.hook_data
        assert lessons, "the teachers are asked before the student"
        rows, values = chunk_rows(batch), []
        gradient = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for lesson in lessons:
            taught = rows.taught[lesson.number]
            blocks = taught.blocks
            of_teacher, found = head_block_losses(
                hidden,
                weight,
                head,
                blocks=[block.student.rows for block in blocks],
                loss=block_loss(
                    lesson.terms, lesson.vocabularies, blocks, _logits(lesson, taught), factor=lesson.factor
                ),
            )
            gradient = gradient + of_teacher
            values.append(found)
        if self.objective.settings.reads_ce:
            edge_weight = -self.objective.settings.ce_weight * rows.token_weight
            own = hidden[: len(batch.edges.row)]
            total, logprob = head_weighted_sum(own, weight, head, edge_weight=edge_weight)
            gradient = gradient + (total - total.detach())
            values.append(logprob[batch.edges.token])
        return with_gradient(gradient, *values)

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of the packed ``[N, 1]``."""
        gradient, values = gradient_and_values(packed)
        rows, lessons = chunk_rows(batch), [(lesson.number, lesson.factor) for lesson in batch.hook_data]
        sizes = [len(rows.taught[number].weight) for number, _ in lessons]
        *terms, logprob = values.split([*sizes, len(values) - sum(sizes)])
        value = self.objective.value(lessons, terms, logprob if self.objective.settings.reads_ce else None, rows)
        return replace(value, loss=value.loss + gradient)


def _logits(lesson: ChunkLesson, taught: TaughtChunks) -> TeacherLogits:
    """Return the logits of the lesson's teacher."""
    if taught.known is not None:
        return taught.known.logits(lesson.vocabularies.teacher)
    assert lesson.taught_by is not None, "a teacher without rows has a model"
    return teacher_logits(lesson.taught_by.hidden, lesson.taught_by.weight, lesson.taught_by.head, taught.blocks)


def chunk_rows(batch: MicroBatch) -> ChunkRows:
    """Return the rows of a micro-batch that the losses of chunks read."""
    assert isinstance(batch.rows, ChunkRows), "a distillation across tokenizers makes them"
    return batch.rows
