"""What a checkpoint holds, put together from its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def plain_content(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint, as Megatron's ``load_plain_tensors`` returns it, which fails with torch 2.15.

    Megatron passes on what torch has written about a tensor, of which ``torch.empty`` does not know the strides.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    wanted = {}
    for name, stored in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            shape = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            wanted[name] = dist_checkpointing.ShardedTensor.from_rank_offsets(name, shape).without_data()
    content: dict[str, Any] = dist_checkpointing.load(wanted, str(checkpoint), validate_access_integrity=False)
    return content
