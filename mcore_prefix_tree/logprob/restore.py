"""From flat per-token values back to per-sample rows."""

from __future__ import annotations

import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.utils.upload import upload


def restore(values: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return each sample's own row of a flat per-token tensor; gradients of shared tokens add up.

    Args:
        values: ``[P, ...]``.
        layout: the layout they belong to.

    Returns:
        One ``[n, ...]`` tensor per sample, in the caller's order of samples.
    """
    index = upload(layout.sample_map, values.device)
    lengths = (layout.cu_sample_lens[1:] - layout.cu_sample_lens[:-1]).tolist()
    return list(values.index_select(0, index).split(lengths))
