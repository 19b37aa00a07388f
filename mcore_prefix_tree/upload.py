"""From the host's arrays to the tensors of a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """A host array as a tensor on the device, without waiting for the work that the device still has to do.

    A copy from pageable memory starts when all of that work is done, and the host waits with it; one from pinned memory
    takes its place in the stream. Torch's host allocator keeps pinned memory until the copy has been made.

    Args:
        array: of any shape and any dtype that torch has; on the CPU the tensor shares its memory, if it is contiguous.
        device: of the tensor.

    Raises:
        ValueError: there is no such device here.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    target = torch.device(device)
    if target.type in ("cpu", "meta"):
        return tensor.to(target)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: torch sees no GPU; name device='cpu'")
    return tensor.pin_memory().to(target, non_blocking=True)
