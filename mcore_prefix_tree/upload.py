"""From the host's arrays to the tensors of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")


def upload(array: npt.NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a host array as a tensor on the device, without waiting for the work that the device still has to do.

    A copy from pageable memory starts when all of that work is done, and the host waits with it; one from pinned memory
    takes its place in the stream. Torch's host allocator keeps pinned memory until the copy has been made.

    Args:
        array: of any shape and any dtype that torch has; on the CPU the tensor shares its memory, if it is contiguous.
            A tensor that is on the device is returned as it is.
        device: of the tensor.

    Raises:
        ValueError: there is no such device here.
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
    """Return ``value`` with the tensors in its dataclasses, mappings and tuples on the device.

    Whatever holds no tensor that has to move is returned as it is, not copied. Lists are long and of the host: they are
    not looked into.
    """
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = upload(value, device)
    elif is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: moved(part, device) for name, part in old.items()}
        if any(new[name] is not old[name] for name in old):
            result = replace(value, **new)
    elif isinstance(value, Mapping):
        new = {name: moved(part, device) for name, part in value.items()}
        if any(new[name] is not value[name] for name in value):
            result = new
    elif isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        if any(part is not before for part, before in zip(parts, value, strict=True)):
            result = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)  # a NamedTuple, or a plain one
    return cast("T", result)
