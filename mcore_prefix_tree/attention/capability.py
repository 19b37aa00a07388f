"""The compute capability of a CUDA device, as a constant for torch.compile.

A separate file, imported when there is a CUDA device: marking a function for torch.compile loads its compiler and
Triton.
"""

from __future__ import annotations

import torch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, such as ``(9, 0)``."""
    return torch.cuda.get_device_capability(device)
