"""The second model of a distillation by whole vocabularies, asked about every unique token before the student is.

Its last hidden states wait on the last pipeline stage until the student's head makes logits of both, a few rows at a
time: neither model's logits are ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.logprob import Head
from mcore_prefix_tree.mcore.engine.folding import plan_attention
from mcore_prefix_tree.mcore.engine.schedule import forward_only
from mcore_prefix_tree.mcore.readout import Hidden
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, TeacherHidden
from mcore_prefix_tree.mcore.seam.output_layer import output_weight_and_head

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
    """This rank's part of a teacher, in the student's parallel layout, or whole on each tensor-parallel rank.

    Attributes:
        chunks: bare model chunks with edge heads, whose weights nothing changes.
        attention_backend: of its heads; the student's may be of another size.
        attention_cases: the calls of its layers.
        columns_over: the student's tensor-parallel group, where the teacher is whole on each of its ranks: each makes
            logits of its part of the vocabulary. None where the teacher is cut as the student is.
    """

    chunks: Sequence[torch.nn.Module]
    attention_backend: str
    attention_cases: Sequence[Case]
    columns_over: dist.ProcessGroup | None = None

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
        asked = [
            replace(
                batch,
                packed_seq_params=replace(batch.packed_seq_params, attention_backend=self.attention_backend),
            )
            for batch in batches
        ]
        found = forward_only(self.chunks, asked, Hidden(), Hidden().read)
        if not found:
            return []
        model = get_attr_wrapped_model(self.chunks[-1], "output_layer", return_model_obj=True)
        made = []
        for batch, hidden in zip(batches, found, strict=True):
            weight, head = output_weight_and_head(model, batch.edges, batch.temperature)
            if self.columns_over is not None:
                weight, head = _part_of(weight, head, self.columns_over)
            # Megatron makes fp32 of whatever a bfloat16 model puts out; these are numbers that bfloat16 has.
            made.append(TeacherHidden(hidden=hidden.to(weight.dtype), weight=weight.detach(), head=head))
        return made


def _part_of(weight: torch.Tensor, head: Head, group: dist.ProcessGroup) -> tuple[torch.Tensor, Head]:
    """Return this rank's columns of a whole output weight ``[V, h]``, as many on each rank, and their head."""
    assert len(weight) % group.size() == 0, "the model is padded for these ranks"
    columns = len(weight) // group.size()
    start = group.rank() * columns
    return weight[start : start + columns], replace(head, vocab_start=start, group=group)
