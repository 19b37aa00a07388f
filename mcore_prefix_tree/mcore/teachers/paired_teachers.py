"""Teachers with another tokenizer, run over the same samples in their own tokens before the student.

Their last hidden states wait on the last pipeline stage until the student's head makes logits of both models for a
block of chunks at a time. All data-parallel ranks then decide together which columns P-KL compares in the full step.

Legend: R rows of a teacher, h hidden size, Wl columns of its vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.logprob import Chunks
from mcore_prefix_tree.logprob.edges import ROWS, slices
from mcore_prefix_tree.mcore.engine.carried_trees import cut_to_score
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Forward, StepHook
from mcore_prefix_tree.mcore.outputs import TeacherHidden
from mcore_prefix_tree.mcore.outputs.distillation import ChunkLesson, chunk_rows
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel
from mcore_prefix_tree.objectives import BoundCrossTokenizer
from mcore_prefix_tree.plan import Carrying
from mcore_prefix_tree.utils.upload import moved
from mcore_prefix_tree.xtoken.losses import (
    ChunkLoss,
    ChunkTerms,
    Part,
    Vocabularies,
    largest_logits,
    make_loss,
    top_columns,
)


@dataclass(eq=False)
class PairedTeachers(StepHook):
    """The teachers of a distillation across tokenizers.

    ``models`` have the student's parallel layout, and are empty if the samples bring rows; ``student_columns`` are its
    output weight's on each tensor-parallel rank, padding included.
    """

    objective: BoundCrossTokenizer
    models: Sequence[TeacherModel]
    student_columns: int
    device: torch.device

    def __post_init__(self) -> None:
        self._vocabularies: dict[int, Vocabularies] = {}
        self._losses: dict[int, ChunkLoss] = {}

    def prepare(self, batches: Sequence[MicroBatch], carrying: Carrying | None = None) -> Sequence[MicroBatch]:
        """Return the micro-batches with the same samples in the tokens of each teacher.

        If these samples are a tree in parts, so are the teacher's: as many parts, one after another.
        """
        asked = [self._asked(number, batches) for number in range(len(self.models))]
        return [replace(batch, hook_data=own) for batch, own in zip(batches, zip(*asked, strict=True), strict=True)]

    def _asked(self, number: int, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return what each micro-batch asks a teacher; a first pass asks nothing."""
        model, asked = self.models[number], list(batches)
        for places in _trees(batches, number):
            one = batches[places[0]]
            folding = Folding(
                max_tokens=one.layout.padded_size,
                dp_size=1,
                cost_model=None,
                device=self.device,
                padding=Padding(multiple=self.objective.pad_to_multiple_of),
                attention_backend=model.attention_backend,
                attention_cases=tuple(model.attention_cases),
                deterministic_attention=one.packed_seq_params.deterministic_attention,
                only_supervised=True,
                head_chunk_rows=one.head_chunk_rows,
            )
            parts = cut_to_score(chunk_rows(one).taught[number].layout, len(places), folding)
            for place, part in zip(places, parts, strict=True):
                asked[place] = replace(part, forward_only=one.forward_only)
        return asked

    def before_step(self, batches: Sequence[MicroBatch], student: Forward) -> list[MicroBatch]:
        asked = [[batch.hook_data[number] for batch in batches] for number in range(len(self.models))]
        found = [
            moved(tuple(model.hidden(of_model)), self.device)
            for model, of_model in zip(self.models, asked, strict=True)
        ]
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return [replace(batch, hook_data=None) for batch in batches]
        lessons = [self._lessons(batches, number, taught_by) for number, taught_by in enumerate(found)]
        of_batches = zip(*lessons, strict=True)
        return [replace(batch, hook_data=own) for batch, own in zip(batches, of_batches, strict=True)]

    def _lessons(
        self, batches: Sequence[MicroBatch], number: int, taught_by: Sequence[TeacherHidden] | None
    ) -> list[ChunkLesson]:
        """Return a teacher's lesson on each micro-batch, from its hidden states; None if the samples bring its rows."""
        settings, side = self.objective.settings, self.objective.sides[number]
        if taught_by is None:
            columns = -(-side.teacher_size // parallel_state.get_tensor_model_parallel_world_size())
            of_trees: Sequence[TeacherHidden | None] = [None] * len(batches)
        else:
            columns, of_trees = len(taught_by[0].weight), _joined(batches, number, taught_by)
        losses, vocabularies = settings.losses, self._both(number, columns)
        if taught_by is not None and losses.top_k is not None and losses.top_k < vocabularies.teacher.size:
            # Other columns in every step.
            loss = make_loss(losses, vocabularies, columns=self._columns(taught_by, vocabularies.teacher))
        else:
            if number not in self._losses:
                self._losses[number] = make_loss(losses, vocabularies)
            loss = self._losses[number]
        weights = settings.teacher_weights or [1.0] * len(self.objective.sides)
        return [
            ChunkLesson(
                taught_by=of_tree,
                terms=ChunkTerms(loss=loss, temperature=losses.temperature, scale=losses.scale),
                vocabularies=vocabularies,
                number=number,
                factor=settings.kd_weight * weights[number] * chunk_rows(batch).taught[number].per_chunk,
            )
            for batch, of_tree in zip(batches, of_trees, strict=True)
        ]

    def _both(self, number: int, columns: int) -> Vocabularies:
        """Return both vocabularies; ``columns`` are the teacher's on each tensor-parallel rank, padding included."""
        if number not in self._vocabularies:
            side = self.objective.sides[number]
            parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
            group = parallel_state.get_tensor_model_parallel_group() if parallel else None
            self._vocabularies[number] = Vocabularies(
                student=Part.even(side.student_size, self.student_columns, group),
                teacher=Part.even(side.teacher_size, columns, group),
                projection=side.projection,
                device=self.device,
            )
        return self._vocabularies[number]

    def _columns(self, taught_by: Sequence[TeacherHidden], part: Part) -> npt.NDArray[np.int64]:
        """Return the columns that P-KL compares, from the logits of all rows of the step."""
        top_k = self.objective.settings.top_k
        assert top_k is not None
        maxima = torch.full((part.width,), -torch.inf, dtype=torch.float64, device=self.device)
        for one in taught_by:
            chunks = Chunks(one.hidden, one.weight, replace(one.head, head_chunk_rows=ROWS))
            for rows in slices(len(one.hidden), ROWS):
                maxima = torch.maximum(maxima, largest_logits(chunks.logits(rows), part).double())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return top_columns(maxima, top_k, part)


@dataclass(eq=False)
class ExportedTeacher(PairedTeachers):
    """A teacher whose rows the samples bring; it has no model."""

    prepare = StepHook.prepare  # the micro-batches have the rows

    def before_step(self, batches: Sequence[MicroBatch], student: Forward) -> list[MicroBatch]:
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return list(batches)
        lessons = self._lessons(batches, 0, None)
        return [replace(batch, hook_data=(lesson,)) for batch, lesson in zip(batches, lessons, strict=True)]


def _trees(batches: Sequence[MicroBatch], number: int) -> Iterable[list[int]]:
    """Return the places of the micro-batches that have the same samples, in the tokens of a teacher."""
    places: dict[int, list[int]] = {}
    for place, batch in enumerate(batches):
        places.setdefault(id(chunk_rows(batch).taught[number].layout), []).append(place)
    return places.values()


def _joined(batches: Sequence[MicroBatch], number: int, found: Sequence[TeacherHidden]) -> list[TeacherHidden]:
    """Return for each micro-batch the hidden states of all parts of its tree, from those of each part."""
    joined = list(found)
    for places in _trees(batches, number):
        if len(places) > 1:
            tree = replace(found[places[0]], hidden=torch.cat([found[place].hidden for place in places]))
            for place in places:
                joined[place] = tree
    return joined
