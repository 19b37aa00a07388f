"""Upload of the host's arrays to the tensors of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.utils.lazy_torch import torch

T = TypeVar("T")


def upload(array: npt.NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a host array ``[...]`` as a tensor on the device, without waiting; raise ValueError without that device.

    A copy from pageable memory starts when the device's pending work is done, and the host waits with it; one from
    pinned memory takes its place in the stream. Torch's host allocator keeps pinned memory until the copy has been
    made. On the CPU the tensor shares a contiguous array's memory. A tensor that is on the device is returned as it is.
    """
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    target = torch.device(device)
    if tensor.device == target:
        return tensor
    if target.type in ("cpu", "meta"):
        return tensor.to(target)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: torch sees no GPU; name device='cpu'")
    return (tensor.pin_memory() if tensor.device.type == "cpu" else tensor).to(target, non_blocking=True)


def moved(value: T, device: torch.device | str) -> T:
    """Return ``value`` with the tensors ``[...]`` in its dataclasses, mappings and tuples on the device.

    A value without a tensor to move is returned without a copy. Lists are long and of the host, and are not searched.
    """
    if isinstance(value, torch.Tensor):
        return cast("T", upload(value, device))
    parts = _parts(value)
    new = {name: moved(part, device) for name, part in parts.items()}
    if all(new[name] is part for name, part in parts.items()):
        return value
    result: Any = new  # of a mapping
    if is_dataclass(value) and not isinstance(value, type):
        result = replace(value, **new)
    elif isinstance(value, tuple):
        result = type(value)(*new.values()) if hasattr(value, "_fields") else tuple(new.values())  # a NamedTuple or not
    return cast("T", result)


def _parts(value: object) -> dict[Any, Any]:
    """Return the parts of a dataclass, a mapping or a tuple by name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, tuple) else {}
