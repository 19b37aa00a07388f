"""``torch.autocast`` around operations that it does not know: their inputs are cast as those of torch's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mcore_prefix_tree.utils.lazy_torch import torch


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_inputs(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast floating tensors as autocast casts the inputs of SDPA, if it is on: to its dtype, except float64."""
    if not autocasts(tensors[0].device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [one if one.dtype == torch.float64 else one.to(dtype) for one in tensors]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations on a device keep the dtypes of their inputs."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()
