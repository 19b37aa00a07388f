"""Estimate the GPU memory of an attention call, so that no call starts that would run out of memory.

Legend: P tokens of a layout, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.attention.parity import MOST_NUMBERS

if TYPE_CHECKING:
    from attention_bench.settings import Settings

# Usable share of the free memory: allocators round up, and kernels need workspaces.
_SHARE = 0.85


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

    Args:
        lens: int64 ``[S]``, lengths of the sequences. A sequence that does not fit by itself is a part too.
        settings: settings of the calls.
        free_bytes: free memory of the device.
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
