"""All ranks of a job, asked together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mcore_prefix_tree.data import Ranks


def everyone(value: Any) -> list[Any]:
    """The value of every rank of the job."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_ranks() -> Ranks:
    """Those of the job, to share the reading of its data; this process alone where it has none, as in a dry run."""
    if not dist.is_initialized():
        return Ranks()
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), gather=everyone)
