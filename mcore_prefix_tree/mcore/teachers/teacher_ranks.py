"""Ranks of a teacher that is sharded over other ranks than its student.

The ranks of a pipeline stage, in order, are cut into runs of T: one run holds a teacher once. With T a multiple of the
student's tensor-parallel size t, the T / t replicas of the student in a run ask together: the teacher reads the
micro-batches of all of them, and each keeps its own answers. With T = 1 each rank has the complete teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mcore_prefix_tree.mcore.ranks import everyone

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherRanks:
    """This rank's place among those of a teacher.

    Attributes:
        groups: Megatron's process groups for the teacher's modules. ``tp`` are the T ranks that hold it once, ``dp_cp``
            the ranks that hold the same part of it.
        on_last_stage: whether all of its layers are only on the ranks of the student's last pipeline stage.
    """

    groups: ProcessGroupCollection
    on_last_stage: bool = False

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
