"""Matrix products of 16-bit numbers whose results and sums stay in fp32, where torch has them."""

from __future__ import annotations

import torch

# The first torch whose addmm adds 16-bit products to an fp32 sum. It does neither on a CPU nor with ROCm.
_FIRST = (2, 11)


def widens(tensor: torch.Tensor) -> bool:
    """Return whether a product of tensors like this one, ``[...]``, can be in fp32, or is as wide anyway."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return True
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return tensor.is_cuda and version >= _FIRST and torch.version.hip is None and not torch.cuda.tunable.is_enabled()


def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write ``left @ right`` of one dtype into ``out``, in that dtype, or in fp32 if it :func:`widens`."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` ``[n, m]`` to a sum in the same or a wider dtype, without a temporary if it widens."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif widens(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
