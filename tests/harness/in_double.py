"""Models of Megatron-LM in fp64, to distinguish rounding from mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class AllInDouble(TorchFunctionMode):
    """Computes in fp64 the parts that upstream computes in fp32 for any dtype, for example routers, gates and losses.

    Two inputs that differ in the last bit of fp64 can round to different numbers of fp32.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, with fp64 instead of the requested fp32."""
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.float and args[0].is_floating_point():
            function = torch.Tensor.double
        if function is torch.Tensor.to:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return function(*args, **kwargs)


@contextmanager
def kept_double() -> Iterator[None]:
    """Leave fp64 what upstream would take to fp32, also in a recomputation, of which a mode is not asked."""
    to, narrow = torch.Tensor.to, torch.Tensor.float

    def is_wide(tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.float64

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(torch.float64 if one is torch.float32 and is_wide(tensor) else one for one in args)
        return to(tensor, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "to", kept))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", lambda x: x if is_wide(x) else narrow(x)))
        for module in _modules_of_sparse_attention():
            stack.enter_context(mock.patch.object(module, "torch", _DoubleTorch("torch")))
        yield


class _DoubleTorch(ModuleType):
    """``torch``, whose ``float32`` is fp64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _modules_of_sparse_attention() -> list[ModuleType]:
    """Upstream's modules that name fp32 as the dtype of masks and sums, and compare it."""
    from mcore_prefix_tree.mcore.release import HAS_SPARSE_ATTENTION

    if not HAS_SPARSE_ATTENTION:
        return []
    from megatron.core.transformer.experimental_attention_variant import dsa, dsa_masking

    return [dsa, dsa_masking]


def with_any_weights(model: torch.nn.Module) -> None:
    """Give a model weights at which no gradient is small."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
