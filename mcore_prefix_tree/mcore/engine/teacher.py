"""The second model of a distillation by whole vocabularies, asked about every unique token before the student is.

Its last hidden states wait on the last pipeline stage until the student's head makes logits of both, a few rows at a
time: neither model's logits are ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.logprob import Head
from mcore_prefix_tree.mcore.engine.folding import plan_attention
from mcore_prefix_tree.mcore.engine.schedule import forward_only
from mcore_prefix_tree.mcore.engine.teacher_ranks import TeacherRanks
from mcore_prefix_tree.mcore.readout import Hidden
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, TeacherHidden
from mcore_prefix_tree.mcore.seam.output_layer import output_weight, output_weight_and_head

# A pass over micro-batches without gradients, which returns what their losses report.
Forward = Callable[[Sequence[MicroBatch]], Sequence[Mapping[str, Any]]]


class Teacher(Protocol):
    """Whatever a job asks before its student."""

    def prepared(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with what asking them takes, made on the host."""

    def teach(self, batches: Sequence[MicroBatch], student: Forward) -> list[MicroBatch]:
        """Return the micro-batches of a step with what the teacher says of them, on the last pipeline stage.

        All ranks together, as in the student's own forward.

        Args:
            batches: with the rows of the job's objective.
            student: its forward pass, for losses whose parts are weighed by what the whole step gives.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherModel(Teacher):
    """This rank's part of a teacher, cut as its student is or in a layout of its own.

    Attributes:
        chunks: bare model chunks with edge heads, whose weights nothing changes; none on ranks without a part.
        attention_backend: of its heads; the student's may be of another size.
        attention_cases: the calls of its layers.
        ranks: of another layout than the student's; None is the student's.
        columns: ``[V / tp, h]``, in another layout the output weight on the last stage, cut as the student's ranks are.
    """

    chunks: Sequence[torch.nn.Module]
    attention_backend: str
    attention_cases: Sequence[Case]
    ranks: TeacherRanks | None = None
    columns: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.ranks is not None and self.chunks and self._model.post_process:
            weight = output_weight(self._model).detach()
            object.__setattr__(self, "columns", self.ranks.columns_of_student(weight))

    @property
    def _model(self) -> Any:
        return get_attr_wrapped_model(self.chunks[-1], "position_embedding_type", return_model_obj=True)

    def prepared(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, with the plans of its attention."""
        for batch in batches:
            plan_attention(batch, self.attention_backend, self.attention_cases)
        return list(batches)

    def teach(self, batches: Sequence[MicroBatch], student: Forward) -> list[MicroBatch]:
        """Return the micro-batches with its hidden states; see :class:`Teacher`."""
        found = self.hidden(batches)
        if not found:
            return list(batches)
        return [replace(batch, teacher=hidden) for batch, hidden in zip(batches, found, strict=True)]

    def hidden(self, batches: Sequence[MicroBatch]) -> list[TeacherHidden]:
        """Return what its logits of each micro-batch's predictors are made of; nothing before the last stage."""
        asked, own = self._asked(batches)
        one_stage = self.ranks is not None and self.ranks.on_last_stage
        found = forward_only(self.chunks, asked, Hidden(), Hidden().read, one_stage=one_stage) if self.chunks else []
        if not found:
            return []
        made = []
        for batch, hidden in zip(batches, found[own], strict=True):
            weight, head = output_weight_and_head(self._model, batch.edges, batch.temperature)
            if self.columns is not None:
                weight, head = _of_student(self.columns, head)
            # Megatron makes fp32 of whatever a bfloat16 model puts out; these are numbers that bfloat16 has.
            made.append(TeacherHidden(hidden=hidden.to(weight.dtype), weight=weight.detach(), head=head))
        return made

    def _asked(self, batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], slice]:
        """Return the micro-batches that the teacher reads, and which of them are this rank's."""
        ours = [self._on_backend(batch) for batch in batches]
        if self.ranks is None or not self.chunks:
            return ours, slice(None)
        layouts, number = self.ranks.together([batch.layout for batch in ours])
        start = sum(map(len, layouts[:number]))
        deterministic = all(batch.packed_seq_params.deterministic_attention for batch in ours)
        asked = []
        for replica, of_replica in enumerate(layouts):
            if replica == number:
                asked += ours
                continue
            others = [
                MicroBatch.from_layout(
                    layout,
                    attention_backend=self.attention_backend,
                    deterministic_attention=deterministic,
                    needed=layout.loss_weight != 0,
                )
                for layout in of_replica
            ]
            asked += self.prepared(others)
        return asked, slice(start, start + len(ours))

    def _on_backend(self, batch: MicroBatch) -> MicroBatch:
        return replace(
            batch, packed_seq_params=replace(batch.packed_seq_params, attention_backend=self.attention_backend)
        )


def _of_student(columns: torch.Tensor, head: Head) -> tuple[torch.Tensor, Head]:
    """Return the output weight of a teacher as its student's ranks are cut, and the head of that."""
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    group = parallel_state.get_tensor_model_parallel_group() if parallel else None
    start = parallel_state.get_tensor_model_parallel_rank() * len(columns)
    return columns, replace(head, vocab_start=start, group=group)
