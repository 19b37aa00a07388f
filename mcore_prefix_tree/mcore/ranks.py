"""The ranks of a job: the place of this one, and their common actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.utils.ranks import ALONE, Ranks

T = TypeVar("T")


def is_main_rank() -> bool:
    """Return whether this rank prints and writes."""
    return dist.get_rank() == 0


def has_logits() -> bool:
    """Return whether this rank holds its replica's losses: last pipeline stage, first tensor-parallel rank."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def everyone(value: Any) -> list[Any]:
    """Return the value of every rank of the job."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_ranks() -> Ranks:
    """Return the ranks that share the reading of data; without a job, for example in a dry run, only this process."""
    if not dist.is_initialized():
        return ALONE
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), gather=everyone, on_main=on_main_rank)


def on_main_rank(action: Callable[[], T]) -> T:
    """Run an action on the main rank; return its result on every rank once it is done.

    Raises:
        MemoryError, OSError, ValueError: the action failed; raised on every rank.
    """
    outcome: list[Any] = [None, None]
    if is_main_rank():
        try:
            outcome[0] = action()
        except (MemoryError, OSError, ValueError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast("T", result)


def is_of_lost_rank(error: BaseException) -> bool:
    """Return whether a collective call failed because another rank is gone."""
    # gloo raises plain errors; NCCL names each of its failures an error of the back-end.
    return isinstance(error, dist.DistNetworkError) or any(word in str(error) for word in ("gloo", "ncclRemoteError"))
