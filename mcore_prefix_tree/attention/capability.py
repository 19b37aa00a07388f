"""A CUDA device's compute capability as a constant for torch.compile; importing this file loads its compiler."""

from __future__ import annotations

import torch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def get_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, for example ``(9, 0)``."""
    return torch.cuda.get_device_capability(device)
