"""Inputs of a distillation across tokenizers, from its teachers and its micro-batches.

Legend: C unique chunks of a micro-batch, E scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.objectives.scored import Int64Array
from mcore_prefix_tree.objectives.scored_rows import LossRows, Targets
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.utils.lazy_torch import torch
from mcore_prefix_tree.xtoken.exported import Labelled
from mcore_prefix_tree.xtoken.fold import Chunks
from mcore_prefix_tree.xtoken.pairs import Pair, Pairing
from mcore_prefix_tree.xtoken.projection import Projection

if TYPE_CHECKING:
    from mcore_prefix_tree.logprob import Edges
    from mcore_prefix_tree.xtoken.losses import Block, KnownRows


def refuse_temperatures(samples: Sequence[Sample]) -> None:
    """Raise SampleError for a sample with a temperature, which no loss of chunks reads."""
    warm = next((sample for sample in samples if sample.temperature != 1), None)
    if warm is not None:
        raise SampleError(
            f"{warm.source}: was drawn at temperature {warm.temperature}, and xtoken compares both models at "
            "its option temperature; drop the field 'temperature' from the data"
        )


def kd_metric(number: int, lessons: int) -> str:
    """Return the name under which the KD of a lesson is reported."""
    return "kd" if lessons == 1 else f"kd_{number}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherSide:
    """Facts of a teacher that are known before its model is built; None for inputs that the loss does not read."""

    pairing: Pairing
    student_size: int
    teacher_size: int
    projection: Projection | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedTeacher:
    """A teacher's samples of whole samples of the student's, which may be a tree in several micro-batches."""

    layout: FlatLayout  # layout of the teacher's samples
    rows: Int64Array  # int64 [R], the predictors of its scored tokens, ascending, at which a model answers
    chunks: Chunks  # chunks of both layouts, in order
    per_chunk: float  # see TaughtChunks
    exported: Labelled | None  # rows that the samples bring; None if its model is run


@dataclass(frozen=True, kw_only=True, eq=False)
class TaughtChunks:
    """The chunks that a micro-batch has with one teacher."""

    layout: FlatLayout  # layout of the teacher's samples, the same object for all parts of a tree
    blocks: tuple[Block, ...]
    weight: torch.Tensor  # float64 [C], weight of each chunk, in the order of the blocks
    multiplicity: torch.Tensor  # float64 [C], number of samples that have it
    first_sample: torch.Tensor  # int64 [C], the first of them in the micro-batch, for messages
    per_chunk: float  # the step's divisor over its chunks, which makes the weighted sum a mean over chunks
    # The teacher's rows that the blocks read, if the samples have them; None if its model is run.
    known: KnownRows | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkRows(LossRows):
    """Inputs of the loss of a micro-batch, on the device."""

    edges: Edges  # edges of the student's scored tokens; their predictors are the student's rows
    token_weight: torch.Tensor  # float64 [E], the masks of all samples that score each, added up
    taught: tuple[TaughtChunks, ...]  # chunks taught by each teacher

    def scored(self, edges: Edges) -> Edges:
        """Return the edges of the scored tokens."""
        return self.edges


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTargets(Targets):
    """Inputs of the losses of a step: ``paired`` has, per teacher, one pair per sample.

    ``folded`` keeps what the parts of a tree have in common, by the layout of the tree, as long as that is there.
    """

    paired: tuple[tuple[Pair, ...], ...] = ()
    folded: WeakKeyDictionary[FlatLayout, tuple[FoldedTeacher, ...]] = field(default_factory=WeakKeyDictionary)

    def per_chunk(self, teacher: int) -> float:
        """Return the step's divisor over the chunks that it has with a teacher; 0 without chunks."""
        chunks = sum(map(len, self.paired[teacher]))
        return self.divisor / chunks if chunks else 0.0
