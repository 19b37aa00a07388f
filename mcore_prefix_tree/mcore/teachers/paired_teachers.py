"""Teachers with another tokenizer, run over the same samples in their own tokens before the student.

Their last hidden states wait on the last pipeline stage until the student's head makes logits of both models for a
block of chunks at a time. All data-parallel ranks then decide together the values of the full step: which columns
P-KL compares, the weight of each teacher, and the weight of KD against CE.

Legend: R rows of a teacher, h hidden size, Wl columns of its vocabulary on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.layout import Padding, fold
from mcore_prefix_tree.logprob import Chunks, head_logprobs
from mcore_prefix_tree.logprob.edges import ROWS, slices
from mcore_prefix_tree.mcore.engine.carried_trees import cut_to_score
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.step_hook import Forward, StepHook
from mcore_prefix_tree.mcore.outputs import TeacherHidden
from mcore_prefix_tree.mcore.outputs.distillation import ChunkLesson, chunk_rows
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, from_first_to_last
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel
from mcore_prefix_tree.objectives import BoundCrossTokenizer
from mcore_prefix_tree.objectives.cross_tokenizer_rows import kd_metric
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
        taught = self._taught(batches)
        if self.objective.settings.scaling != "dynamic":
            return taught
        with torch.no_grad():
            return _balanced(taught, student(_for_scoring(taught, self.objective.pad_to_multiple_of)))

    def _taught(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        asked = [[batch.hook_data[number] for batch in batches] for number in range(len(self.models))]
        found = [
            moved(tuple(model.hidden(of_model)), self.device)
            for model, of_model in zip(self.models, asked, strict=True)
        ]
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return [replace(batch, hook_data=None) for batch in batches]
        if self.objective.settings.teachers == "averaged_logits" and len(self.models) > 1:
            weights = self.objective.settings.teacher_weights or [1.0] * len(found)
            mix = tuple(weight / sum(weights) for weight in weights)
            lessons = [self._lessons(batches, 0, found, mix, 1.0, len(found[0][0].weight))]
        else:
            lessons = [
                self._lessons(batches, number, [found[number]], (1.0,), share, len(found[number][0].weight))
                for number, share in enumerate(self._shares(found, asked))
            ]
        of_batches = zip(*lessons, strict=True)
        return [replace(batch, hook_data=own) for batch, own in zip(batches, of_batches, strict=True)]

    def _lessons(
        self,
        batches: Sequence[MicroBatch],
        number: int,
        taught_by: Sequence[Sequence[TeacherHidden]],
        mix: tuple[float, ...],
        share: float,
        columns: int,
    ) -> list[ChunkLesson]:
        """Return a teacher's lesson on each micro-batch, with weight ``share``, from its models' hidden states."""
        settings, kd_weight = self.objective.settings.losses, self.objective.settings.kd_weight
        vocabularies = self._both(number, columns)
        if settings.top_k is not None and settings.top_k < vocabularies.teacher.size:
            # Other columns in every step.
            loss = make_loss(settings, vocabularies, columns=self._columns(taught_by, mix, vocabularies.teacher))
        else:
            if number not in self._losses:
                self._losses[number] = make_loss(settings, vocabularies)
            loss = self._losses[number]
        terms = ChunkTerms(loss=loss, temperature=settings.temperature, scale=settings.scale)
        of_trees = [_joined(batches, number, of_model) for of_model in taught_by]
        return [
            ChunkLesson(
                taught_by=tuple(of_model[at] for of_model in of_trees),
                mix=mix,
                terms=terms,
                vocabularies=vocabularies,
                number=number,
                factor=kd_weight * share * chunk_rows(batch).taught[number].per_chunk,
            )
            for at, batch in enumerate(batches)
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

    def _columns(
        self, taught_by: Sequence[Sequence[TeacherHidden]], mix: tuple[float, ...], part: Part
    ) -> npt.NDArray[np.int64]:
        """Return the columns that P-KL compares, from the logits of all rows of the step."""
        top_k = self.objective.settings.top_k
        assert top_k is not None
        maxima = torch.full((part.width,), -torch.inf, dtype=torch.float64, device=self.device)
        for of_batch in zip(*taught_by, strict=True):
            each = [Chunks(one.hidden, one.weight, replace(one.head, head_chunk_rows=ROWS)) for one in of_batch]
            for rows in slices(len(of_batch[0].hidden), ROWS):
                logits = sum(share * chunks.logits(rows) for share, chunks in zip(mix, each, strict=True))
                assert isinstance(logits, torch.Tensor)
                maxima = torch.maximum(maxima, largest_logits(logits, part).double())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return top_columns(maxima, top_k, part)

    def _shares(self, found: Sequence[Sequence[TeacherHidden]], asked: Sequence[Sequence[MicroBatch]]) -> list[float]:
        settings = self.objective.settings
        if settings.teachers == "weights":
            return list(settings.teacher_weights or [1.0] * len(found))
        if len(found) == 1:
            return [1.0]  # the average, the softmax and the lowest of one
        entropies = [self._cross_entropy(number, *of) for number, of in enumerate(zip(found, asked, strict=True))]
        if settings.teachers == "lowest_ce":
            return [float(number == int(np.argmin(entropies))) for number in range(len(entropies))]
        scores = [math.exp(settings.score_sharpness * (min(entropies) - entropy)) for entropy in entropies]
        return [score / sum(scores) for score in scores]

    def _cross_entropy(self, number: int, found: Sequence[TeacherHidden], asked: Sequence[MicroBatch]) -> float:
        """Return a teacher's own mean negative log-likelihood of the step's chunks, token by token."""
        size = self._both(number, len(found[0].weight)).teacher.size
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for one, batch in zip(found, asked, strict=True):
            weight = torch.from_numpy(batch.layout.edge_weight).to(self.device)
            with torch.no_grad():
                logprob, _ = head_logprobs(one.hidden, one.weight, replace(one.head, vocab_size=size))
            assert one.head.edges.token is not None
            weight = weight[one.head.edges.token]
            sums += torch.stack([-torch.dot(weight, logprob[one.head.edges.token].double()), weight.sum()])
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        total, count = sums.tolist()
        return total / count if count else 0.0


@dataclass(eq=False)
class ExportedTeacher(PairedTeachers):
    """A teacher whose rows the samples bring; it has no model."""

    prepare = StepHook.prepare  # the micro-batches have the rows

    def _taught(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return list(batches)
        (side,) = self.objective.sides
        columns = -(-side.teacher_size // parallel_state.get_tensor_model_parallel_world_size())
        (share,) = self.objective.settings.teacher_weights or [1.0]
        lessons = self._lessons(batches, 0, (), (), share, columns)
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


def _for_scoring(batches: Sequence[MicroBatch], multiple: int) -> list[MicroBatch]:
    """Return as many micro-batches for a pass over all parts of trees; in place of first passes they are empty."""
    scored = []
    for batch in from_first_to_last(batches):
        one = batch.for_scoring()
        if batch.forward_only:
            empty = MicroBatch.from_layout(
                fold([], pad_to_multiple_of=multiple),
                attention_backend=batch.packed_seq_params.attention_backend,
            )
            one = replace(empty, rows=batch.rows, hook_data=batch.hook_data)
        scored.append(one)
    return scored


def _balanced(batches: Sequence[MicroBatch], reported: Sequence[Mapping[str, Any]]) -> list[MicroBatch]:
    """Return micro-batches with KD as large as CE, from a forward pass's reports; the last stage calls it together."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return list(batches)
    lessons: tuple[ChunkLesson, ...] = batches[0].hook_data if batches else ()
    numbers = [lesson.number for lesson in lessons]
    names = [kd_metric(number, len(numbers)) for number in numbers] + ["ce"]
    sums = sum(torch.stack([entry["metrics"][name] for name in names]) for entry in reported)
    assert isinstance(sums, torch.Tensor), "every rank has a micro-batch"
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    *of_lessons, (ce, _) = sums.tolist()
    # Both before the division by the step's divisor.
    factors = [lesson.factor for lesson in lessons]
    kd = sum(factor * total for factor, (total, _) in zip(factors, of_lessons, strict=True))
    scale = abs(ce / kd) if kd else 1.0
    return [
        replace(batch, hook_data=tuple(replace(lesson, factor=scale * lesson.factor) for lesson in batch.hook_data))
        for batch in batches
    ]
