"""Comparison of the pictures of a call: which are equal, and a number for each row of their features.

Legend: N pictures, U different ones; features are rows of a tower's output, so many for each picture as it has tokens.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch

from mcore_prefix_tree.layout.trainer_rows import Int64Array


def read_grids(pixels: torch.Tensor | None, grids: torch.Tensor | None) -> Int64Array:
    """Return the grids of a call's pictures on the host, ``[N, 3]``.

    Args:
        pixels: ``[patches, size]``, those of all pictures; None without any.
        grids: integers ``[N, 3]``, frames, rows and columns of patches.

    Raises:
        ValueError: pixels do not have grids, or their number of patches, or want gradients.
    """
    if pixels is None:
        return np.zeros((0, 3), dtype=np.int64)
    if grids is None:
        raise ValueError("pixel_values have no image_grid_thw: pass the grid of each picture")
    if pixels.requires_grad:
        raise ValueError("folding does not support gradients of pixel_values: equal pictures share them")
    host = np.array(grids.tolist(), dtype=np.int64).reshape(-1, 3)
    if (patches := int(host.prod(1).sum())) != len(pixels):
        raise ValueError(f"image_grid_thw describes {patches} patches, but pixel_values have {len(pixels)}")
    return host


def compare_pictures(pixels: torch.Tensor, grids: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the kind of each picture ``[N]`` and the first picture of each kind ``[U]``, by bytes and grid."""
    parts = pixels.detach().cpu().contiguous().split(grids.prod(1).tolist())
    first: dict[tuple[bytes, bytes], int] = {}
    same = [
        first.setdefault((blake2b(part.flatten().view(torch.uint8).numpy()).digest(), grid.tobytes()), at)
        for at, (part, grid) in enumerate(zip(parts, grids, strict=True))
    ]
    firsts = np.array(list(first.values()), dtype=np.int64)
    return np.searchsorted(firsts, same), firsts


def number_features(size: Int64Array, same: Int64Array, first: Int64Array) -> Int64Array:
    """Return a number for each token of all pictures, one after another, which is equal for equal features.

    ``size`` ``[N]`` are the tokens of each picture; the others are those of :func:`compare_pictures`. Numbers count the
    features of the different pictures.
    """
    start = np.cumsum(size[first]) - size[first]
    numbers: Int64Array = np.arange(size.sum()) + np.repeat(start[same] - (np.cumsum(size) - size), size)
    return numbers
