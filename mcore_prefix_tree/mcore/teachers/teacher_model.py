"""The second model of a distillation by full vocabularies, run over every unique token before the student; its ranks.

Its last hidden states wait on the last pipeline stage until the student's head makes logits of both, a few rows at a
time: neither model's logits are ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.mcore.engine.folding import plan_attention
from mcore_prefix_tree.mcore.engine.job import Forward, StepHook
from mcore_prefix_tree.mcore.engine.pipeline import forward_only
from mcore_prefix_tree.mcore.outputs import Hidden, TeacherHidden
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, from_first_to_last
from mcore_prefix_tree.mcore.seam.output_layer import output_weight, output_weight_and_head
from mcore_prefix_tree.plan import Carrying

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherRanks:
    """This rank's place among those of a teacher that is sharded over other ranks than its student.

    The ranks of a pipeline stage, in order, are cut into runs of T: one run holds a teacher once. With T a multiple of
    the student's tensor-parallel size t, the T / t replicas of the student in a run ask together: the teacher reads the
    micro-batches of all of them, and each keeps its own answers. With T = 1 each rank has the complete teacher.
    """

    # Megatron's process groups for the teacher's modules. tp are the T ranks that hold it once, dp_cp the ranks that
    # hold the same part of it.
    groups: ProcessGroupCollection
    on_last_stage: bool = False  # whether all of its layers are only on the ranks of the student's last pipeline stage

    @classmethod
    def of(cls, tensor_parallel: int, *, on_last_stage: bool = False) -> TeacherRanks | None:
        """Return the ranks of teachers in a layout, or None for the student's layout; all ranks call it together.

        ``tensor_parallel`` is T: 1 or a multiple of the student's that divides the ranks of a pipeline stage.
        """
        groups = ProcessGroupCollection.use_mpu_process_groups()
        on_last_stage = on_last_stage and parallel_state.get_pipeline_model_parallel_world_size() > 1
        if tensor_parallel == groups.tp.size() and not on_last_stage:
            return None
        # Folding has no context parallelism: this group has one rank.
        alone = groups.cp
        if tensor_parallel != groups.tp.size():
            groups.tp, groups.dp_cp = _runs(tensor_parallel, alone)
            groups.tp_cp = groups.tp
        if on_last_stage:
            groups.pp = alone
        return cls(groups=groups, on_last_stage=on_last_stage)

    @property
    def is_here(self) -> bool:
        """Return whether this rank has a part of the teacher."""
        return not self.on_last_stage or bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

    def together(self, own: Sequence[T]) -> tuple[list[Sequence[T]], int]:
        """Return the requests of each replica of the student, given this rank's own, and the index of its replica."""
        step = parallel_state.get_tensor_model_parallel_world_size()
        if self.groups.tp.size() <= step:
            return [own], 0
        asked: list[Any] = [None] * self.groups.tp.size()
        dist.all_gather_object(asked, list(own), group=self.groups.tp)
        return asked[::step], self.groups.tp.rank() // step

    def columns_of_student(self, weight: torch.Tensor) -> torch.Tensor:
        """Return an output weight ``[V / T, h]`` sharded over the student's tensor-parallel ranks: ``[V / t, h]``."""
        held, rank = self.groups.tp.size(), self.groups.tp.rank()
        parts = parallel_state.get_tensor_model_parallel_world_size()
        part = parallel_state.get_tensor_model_parallel_rank()
        if held == parts:
            return weight
        if held == 1:
            assert len(weight) % parts == 0, "the model is padded for these ranks"
            part_of: torch.Tensor = weight.tensor_split(parts)[part]
            return part_of
        # A run of replicas: rank i of the T has a part of the weight of every rank i // replicas of the student's t.
        replicas = held // parts
        sent, taken = [0] * held, [0] * held
        for replica in range(replicas):
            sent[replica * parts + rank // replicas] = len(weight)
            taken[part * replicas + replica] = len(weight)
        found = weight.new_empty((replicas * len(weight), weight.shape[1]))
        dist.all_to_all_single(found, weight.repeat(replicas, 1), taken, sent, group=self.groups.tp)
        return found


def _runs(size: int, alone: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's run, and the ranks at its place in all runs of its stage."""
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if size == 1:
        return alone, stage
    # Tensor-parallel ranks are neighbours in every order of Megatron's.
    ranks = sorted(dist.get_process_group_ranks(stage))
    runs: dist.ProcessGroup | None = None
    places: dist.ProcessGroup | None = None
    # Every rank makes every group, in one order.
    for members in sorted(set(map(tuple, everyone(ranks)))):
        for start in range(0, len(members), size):
            runs = _made(members[start : start + size]) or runs
        for place in range(size):
            places = _made(members[place::size]) or places
    assert runs is not None, "this rank is in one of them"
    assert places is not None, "this rank is in one of them"
    return runs, places


def _made(members: Sequence[int]) -> dist.ProcessGroup | None:
    group: Any = dist.new_group(list(members))
    return group if dist.get_rank() in members else None


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherModel(StepHook):
    """This rank's part of a teacher, sharded like its student or in a separate layout."""

    # Bare model chunks with edge heads and frozen weights; empty on ranks without a part.
    chunks: Sequence[torch.nn.Module]
    attention_backend: str  # name of the attention back-end for its heads; the student's heads may have another size
    attention_cases: Sequence[Case]
    ranks: TeacherRanks | None = None  # ranks of a layout other than the student's; None is the student's
    # [V / tp, h], output weight on the last stage in another layout, sharded over the student's ranks.
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
        """Return the inputs of its logits at each micro-batch's predictors; empty before the last stage.

        Parts of trees run from the first to the last, once each: a first pass is the student's, and predicts nothing.
        """
        order = [batch for batch in from_first_to_last(batches) if not batch.forward_only]
        asked, own = self._asked(order)
        one_stage = self.ranks is not None and self.ranks.on_last_stage
        found = forward_only(self.chunks, asked, Hidden(), Hidden().read, one_stage=one_stage) if self.chunks else []
        if not found:
            return []
        hidden = dict(zip(map(id, order), found[own], strict=False))
        made = []
        for batch in batches:
            weight, head = output_weight_and_head(self._model, batch.edges, batch.temperature)
            if self.columns is not None:
                parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
                group = parallel_state.get_tensor_model_parallel_group() if parallel else None
                start = parallel_state.get_tensor_model_parallel_rank() * len(self.columns)
                weight, head = self.columns, replace(head, vocab_start=start, group=group)
            of_batch = hidden.get(id(batch), weight.new_empty(0, weight.shape[1]))
            # Megatron converts the output of a bfloat16 model to fp32; these are numbers that bfloat16 has.
            made.append(TeacherHidden(hidden=of_batch.to(weight.dtype), weight=weight.detach(), head=head))
        return made

    def _asked(self, batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], slice]:
        """Return the micro-batches that the teacher reads, and the slice of them that is this rank's."""
        scoring = [batch.without_routes().for_scoring() for batch in batches]  # routes are of the student's experts
        params = [replace(batch.packed_seq_params, attention_backend=self.attention_backend) for batch in scoring]
        ours = [replace(batch, packed_seq_params=own) for batch, own in zip(scoring, params, strict=True)]
        # Schedules of virtual stages run a multiple of the stages.
        stages = parallel_state.get_pipeline_model_parallel_world_size() if len(self.chunks) > 1 else 1
        ours += [self._nothing() for _ in range(-len(ours) % stages)]
        if self.ranks is None or not self.chunks:
            return ours, slice(len(batches))
        together, number = self.ranks.together([(batch.layout, batch.packed_seq_params) for batch in ours])
        start = sum(map(len, together[:number]))
        asked = []
        for replica, of_replica in enumerate(together):
            if replica == number:
                asked += ours
                continue
            others = [
                replace(
                    MicroBatch.from_layout(replace(layout, routes=None), needed=layout.edge_weight != 0),
                    packed_seq_params=params,
                )
                for layout, params in of_replica
            ]
            asked += self.prepare(others)
        return asked, slice(start, start + len(batches))

    def _nothing(self) -> MicroBatch:
        """Return a micro-batch of padding, as few tokens as tensor-parallel ranks can share."""
        layout = fold([], padded_size=parallel_state.get_tensor_model_parallel_world_size())
        return MicroBatch.from_layout(layout, attention_backend=self.attention_backend)
