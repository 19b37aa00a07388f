"""Write Megatron's distributed checkpoints in the ranks themselves.

Megatron's own strategy hands the data to processes that it starts. A signal to the job's process group ends them, and
so does the kernel when memory runs out; then the save never returns. Here each rank writes its files in its own
threads, with torch's writer. The format is the same, and Megatron-LM reads it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

_FILES = 2  # of a rank, as many as Megatron 0.16 writes


class WriteInRank(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's ``torch_dist`` strategy for saving, without its processes."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the main replica of every tensor and object; all ranks together. An error is raised on every rank."""
        by_key = defaultdict(list)
        for part in nested_values(sharded_state_dict):
            if is_main_replica(part.replica_id):
                by_key[part.unique_key if isinstance(part, ShardedObject) else part.key].append(part)
        save(
            mcore_to_pyt_state_dict(by_key, False),
            # torch's way to copy ahead from a GPU is for one thread.
            storage_writer=_Writer(checkpoint_dir, per_thread_copy_ahead=0),
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


class _Writer(FileSystemWriter):
    """Writes a rank's files in threads and raises all errors; torch's writer loses those after the first."""

    @property
    def checkpoint_id(self) -> str:
        """Folder as a string. A ``Path`` would be pickled as one, which is more than data."""
        return str(self.path)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this rank's files; no file if the plan gives it nothing to write."""

        def write(number: int, items: list[Any]) -> list[Any]:
            # torch appends its own number: __0_0.distcp and __0_10.distcp are the files of rank 0.
            storage = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number or ''}")
            share = replace(plan, items=items, storage_data=storage)
            return super(_Writer, self).write_data(share, planner).value()

        with ThreadPoolExecutor(_FILES) as threads:
            writing = [threads.submit(write, *part) for part in enumerate(_shares(plan.items))]
        written: Future[list[Any]] = Future()
        written.set_result([result for share in writing for result in share.result()])
        return written


def _shares(items: Iterable[Any]) -> list[list[Any]]:
    """Return items of about the same size for each file; no empty file."""
    shares: list[list[Any]] = [[] for _ in range(_FILES)]
    sizes = [0] * _FILES
    for item in sorted(items, key=_size, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(item)
        sizes[least] += _size(item)
    return [share for share in shares if share]


def _size(item: Any) -> int:
    # Of tensors in elements. Objects are small, and nobody knows how small before they are pickled.
    return 1 if item.tensor_data is None else math.prod(item.tensor_data.chunk.sizes)
