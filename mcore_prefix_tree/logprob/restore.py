"""From flat per-token values back to per-sample rows."""

from __future__ import annotations

from typing import Any

import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.utils.upload import upload


def restore(values: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return each sample's own row of a flat per-token tensor; gradients of shared tokens add up.

    Args:
        values: ``[P, ...]``, or scores ``[P + M, ...]`` of a layout with M kept edges.
        layout: the layout they belong to.

    Returns:
        One ``[n, ...]`` tensor per sample, in the caller's order of samples.
    """
    index = upload(layout.places if len(values) == layout.num_places else layout.sample_map, values.device)
    lengths = (layout.cu_sample_lens[1:] - layout.cu_sample_lens[:-1]).tolist()
    return list(values.index_select(0, index).split(lengths))


# Columns of half-precision gradients that are summed in fp32 at a time.
_COLUMNS = 1024


def expand(values: torch.Tensor, place: torch.Tensor, *, dim: int = 0, padded: bool = True) -> torch.Tensor:
    """Return values ``[..., P, ...]`` at each token of ``place``, int64 ``[T]``, 0 for padding P; gradients add up."""
    expanded: torch.Tensor = _Expand.apply(values, place, dim, padded)  # type: ignore[no-untyped-call]
    return expanded


class _Expand(torch.autograd.Function):
    """``index_select``, but its backward sums in fp32 or wider: many rows may share a token."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, place: torch.Tensor, dim: int, padded: bool) -> torch.Tensor:
        """Return ``[..., T, ...]`` for values ``[..., P, ...]`` and place ``[T]``."""
        ctx.save_for_backward(place)
        ctx.dim, ctx.shape = dim, values.shape
        if padded:
            values = torch.cat((values, torch.zeros_like(values.narrow(dim, 0, 1))), dim)
        return values.index_select(dim, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        """Return the gradient ``[..., P, ...]`` for ``[..., T, ...]``."""
        (place,) = ctx.saved_tensors
        shape = [size + 1 if dim == ctx.dim else size for dim, size in enumerate(ctx.shape)]
        total = grad.new_zeros(shape)
        if grad.dtype.itemsize >= 4:
            total.index_add_(ctx.dim, place, grad)
        else:
            for part, sums in zip(grad.split(_COLUMNS, -1), total.split(_COLUMNS, -1), strict=True):
                sums.copy_(torch.zeros_like(sums, dtype=torch.float32).index_add_(ctx.dim, place, part.float()))
        return total.narrow(ctx.dim, 0, ctx.shape[ctx.dim]), None, None, None
