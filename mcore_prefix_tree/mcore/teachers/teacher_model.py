"""The second model of a distillation by full vocabularies, run over every unique token before the student.

Its last hidden states wait on the last pipeline stage until the student's head makes logits of both, a few rows at a
time: neither model's logits are ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.logprob import Head
from mcore_prefix_tree.mcore.engine.folding import plan_attention
from mcore_prefix_tree.mcore.engine.pipeline import forward_only
from mcore_prefix_tree.mcore.engine.step_hook import Forward, StepHook
from mcore_prefix_tree.mcore.outputs import Hidden, TeacherHidden
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.output_layer import output_weight, output_weight_and_head
from mcore_prefix_tree.mcore.teachers.teacher_ranks import TeacherRanks
from mcore_prefix_tree.plan import Carrying


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherModel(StepHook):
    """This rank's part of a teacher, sharded like its student or in a separate layout.

    Attributes:
        chunks: bare model chunks with edge heads and frozen weights; empty on ranks without a part.
        attention_backend: name of the attention back-end for its heads; the student's heads may have another size.
        ranks: ranks of a layout other than the student's; None is the student's.
        columns: ``[V / tp, h]``, output weight on the last stage in another layout, sharded over the student's ranks.
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

    def prepare(self, batches: Sequence[MicroBatch], carrying: Carrying | None = None) -> list[MicroBatch]:
        """Return the micro-batches with the plans of its attention."""
        for batch in batches:
            plan_attention(batch, self.attention_backend, self.attention_cases)
        return list(batches)

    def before_step(self, batches: Sequence[MicroBatch], student: Forward) -> list[MicroBatch]:
        found = self.hidden(batches)
        if not found:
            return list(batches)
        return [replace(batch, hook_data=hidden) for batch, hidden in zip(batches, found, strict=True)]

    def hidden(self, batches: Sequence[MicroBatch]) -> list[TeacherHidden]:
        """Return the inputs of its logits at each micro-batch's predictors; empty before the last stage."""
        asked, own = self._asked(batches)
        one_stage = self.ranks is not None and self.ranks.on_last_stage
        found = forward_only(self.chunks, asked, Hidden(), Hidden().read, one_stage=one_stage) if self.chunks else []
        if not found:
            return []
        made = []
        for batch, hidden in zip(batches, found[own], strict=True):
            weight, head = output_weight_and_head(self._model, batch.edges, batch.temperature)
            if self.columns is not None:
                weight, head = _shard_as_student(self.columns, head)
            # Megatron converts the output of a bfloat16 model to fp32; these are numbers that bfloat16 has.
            made.append(TeacherHidden(hidden=hidden.to(weight.dtype), weight=weight.detach(), head=head))
        return made

    def _asked(self, batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], slice]:
        """Return the micro-batches that the teacher reads, and the slice of them that is this rank's."""
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
                    replace(layout, routes=None),
                    attention_backend=self.attention_backend,
                    deterministic_attention=deterministic,
                    needed=layout.loss_weight != 0,
                )
                for layout in of_replica
            ]
            asked += self.prepare(others)
        return asked, slice(start, start + len(ours))

    def _on_backend(self, batch: MicroBatch) -> MicroBatch:
        batch = batch.without_routes()  # they are of the student's experts
        return replace(
            batch, packed_seq_params=replace(batch.packed_seq_params, attention_backend=self.attention_backend)
        )


def _shard_as_student(columns: torch.Tensor, head: Head) -> tuple[torch.Tensor, Head]:
    """Return a teacher's output weight ``[V / tp, h]``, sharded over its student's ranks, and its head."""
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    group = parallel_state.get_tensor_model_parallel_group() if parallel else None
    start = parallel_state.get_tensor_model_parallel_rank() * len(columns)
    return columns, replace(head, vocab_start=start, group=group)
