"""The block lists of a micro-batch as the kernels read them, on the device.

A schedule of n blocks is one int32 tensor: ``bounds`` [4, n], ``order`` [n], then the list that the bounds point into,
then one more number, which a kernel that reads a step ahead may read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from mcore_prefix_tree.attention.tile_blocks import BlockPlan, Tiles, block_plan
from mcore_prefix_tree.attention.triton_tree.config import Configs, Launch
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload

# All block sizes divide this, so that per-token arrays rounded up to it need no bounds checks.
ROUND = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class DevicePlan:
    """Tensors of a tree that the kernels read, on the device."""

    end: torch.Tensor  # int32 [R], subtree_end, zero past the last token; R is P rounded up to ROUND
    position: torch.Tensor  # int32 [R], position on the path, zero past the last token
    # Schedules of the forward kernel's query blocks, of the key blocks of the kernel of dK and dV, and of the query
    # blocks of the kernel of dQ.
    schedules: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, metadata: TreeMetadata, configs: Configs, window: int | None) -> DevicePlan:
        """Return the plan of a micro-batch, without waiting for the device."""
        device = metadata.subtree_end.device
        past_the_end = (0, -metadata.padded_size % ROUND)

        def plan(launch: Launch) -> BlockPlan:
            return block_plan(metadata, launch.query_block, launch.key_block, window=window)

        tiles = (plan(configs.forward).by_query, plan(configs.key_value).by_key, plan(configs.query).by_query)
        return cls(
            end=F.pad(metadata.subtree_end, past_the_end),
            position=F.pad(metadata.tree_position_ids, past_the_end),
            schedules=tuple(upload(_schedule(one), device) for one in tiles),
        )


def _schedule(tiles: Tiles) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    blocks = np.zeros(0, dtype=np.int32) if tiles.blocks is None else tiles.blocks
    return np.concatenate([tiles.bounds.T.ravel(), tiles.longest_first, blocks, np.zeros(1, dtype=np.int32)])
