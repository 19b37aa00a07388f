"""Launches of Triton kernels, and whether this process can make them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

# Of multiplication and addition: the default until Triton 3.10. Triton 3.9 warns if a launch does not set it.
_FP_FUSION = True
# Properties of the process, determined once: torch.compile can trace a look-up here, but not the determination.
_KNOWN: dict[str, bool] = {}


def has_triton() -> bool:
    """Return whether Triton 3.4 or newer is installed."""
    if "triton" not in _KNOWN:
        found = find_spec("triton") is not None and find_spec("triton.tools.tensor_descriptor") is not None
        _KNOWN["triton"] = found
    return _KNOWN["triton"]


def interprets() -> bool:
    """Return whether kernels run in NumPy: Triton's own switch, for tests."""
    if "interpreter" not in _KNOWN:
        import triton

        _KNOWN["interpreter"] = bool(triton.knobs.runtime.interpret)
    return _KNOWN["interpreter"]


def kernels_run_on(tensor: torch.Tensor) -> bool:
    """Return whether our kernels compute with a tensor ``[...]``: in 32 or 16 bits on an NVIDIA GPU, or interpreted."""
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not has_triton():
        return False
    if not tensor.is_cuda:
        return tensor.device.type == "cpu" and interprets()
    return torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def launch_kernel(kernel: Any, programs: int, like: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of a tensor ``[...]``, in its current stream, not on the current device."""
    with torch.cuda.device_of(like):
        kernel[(programs,)](*arguments, enable_fp_fusion=_FP_FUSION, **constants)
