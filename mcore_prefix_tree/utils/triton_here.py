"""Launches of Triton kernels, whether this process can make them, and the error of a kernel that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class ParityError(ValueError):
    """A kernel is wrong or does not run on this machine. The message names it, the fault, and an alternative."""


def can_compare() -> bool:
    """Return whether numbers can be read back: not while torch.compile traces or a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    # Only a process that has initialized CUDA has a stream to ask: a CUDA build without a driver raises.
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def require_parity(
    kernel: str, compare: Callable[[], Mapping[str, float]], limit: Callable[[str], float], case: str, way_out: str
) -> None:
    """Raise ParityError if ``compare`` fails, or returns an error of a row by name that is above its ``limit``."""
    try:
        errors = compare()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A package of another version takes other arguments, or its compiler fails.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ParityError(f"{kernel} does not run on this machine: {reason}; {way_out}") from error
    for what, size in errors.items():
        if not size <= limit(what):  # NaN is not
            raise ParityError(
                f"{kernel} is wrong on this machine: {what} is off by {size:.1e} of a row, where {limit(what):.1e} is "
                f"rounding ({case}); {way_out}"
            )


def worst_row(actual: torch.Tensor, expected: torch.Tensor, *, may_vanish: bool = False) -> float:
    """Return the largest relative error of a row, the last dimension of ``[..., n]``."""
    truth = expected.double()
    rows = truth.norm(dim=-1)
    if may_vanish:
        rows = torch.maximum(rows, rows.square().mean().sqrt())
    return float(((actual.double() - truth).norm(dim=-1) / rows).max())
