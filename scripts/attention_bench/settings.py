"""Settings of the attention benchmark, and an estimate of a call's memory, so that none starts that would not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.parity import MOST_NUMBERS

# Usable share of the free memory: allocators round up, and kernels need workspaces.
_SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement; in each of ``repeats`` rounds every method runs once."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    repeats: int

    @property
    def case(self) -> Case:
        """Return the case that back-ends accept or refuse."""
        device = torch.device(self.device)
        return Case(
            device=device,
            capability=torch.cuda.get_device_capability() if device.type == "cuda" else None,
            dtype=getattr(torch, self.dtype),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            needs_grad=True,
            options=AttentionOptions(softmax_scale=1 / math.sqrt(self.head_dim)),
        )


def bytes_per_token(settings: Settings) -> int:
    """Return the bytes per token in forward and backward of the method that needs the most memory.

    Counts inputs and a gradient; results, and those that they are compared with; dQ in fp32, and dK and dV for every
    query head, as in FlashAttention-2 with grouped heads; a log-sum-exp and a sum in fp32 for each head.
    """
    heads, kv_heads = settings.heads, settings.kv_heads
    width = settings.head_dim + settings.value_dim
    tensors = (heads + kv_heads) * width * settings.case.dtype.itemsize
    return 3 * tensors + 4 * heads * settings.head_dim + heads * width * settings.case.dtype.itemsize + 8 * heads


def misfit(tokens: int, settings: Settings, free_bytes: int) -> str | None:
    """Return why a layout of so many tokens does not fit, or None."""
    needed = tokens * bytes_per_token(settings)
    if needed <= _SHARE * free_bytes:
        return None
    return f"it would need about {needed / 2**30:.0f} GiB, and {free_bytes / 2**30:.0f} GiB are free"


def parts_that_fit(lens: npt.NDArray[np.int64], settings: Settings, free_bytes: int) -> list[npt.NDArray[np.int64]]:
    """Divide sequences that share nothing into the fewest consecutive parts that fit the memory and the kernels.

    A sequence that does not fit by itself is a part too.
    """
    numbers = settings.heads * max(settings.head_dim, settings.value_dim)
    most = max(1, min(int(_SHARE * free_bytes) // bytes_per_token(settings), MOST_NUMBERS // numbers))
    count = -(-int(lens.sum()) // most)
    while True:
        # Nearly equal parts, so that none is too small to fill a GPU.
        parts = [part for part in np.array_split(lens, min(count, len(lens))) if len(part)]
        if count >= len(lens) or all(part.sum() <= most for part in parts):
            return parts
        count += 1
