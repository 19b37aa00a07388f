"""The compiled part of TransformerEngine in plain torch: the functions of its high-precision Python layers, on a CPU.

Importing this module, before Megatron-Core, puts it in the place of ``transformer_engine_torch``. TransformerEngine's
own Python, as released, is then imported from the path and runs: its modules, their autograd functions, their calls of
matrix products and norms, their communication. Only the kernels behind them are these functions. float64 is added to
the dtypes that it knows, so that its results can be compared up to rounding.
"""

from __future__ import annotations

import enum
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

assert "megatron.core" not in sys.modules, "Megatron-Core looks for TransformerEngine when it is imported"
Tensor = torch.Tensor
# It loads no shared library while it is being built.
os.environ["NVTE_PROJECT_BUILDING"] = "1"
os.environ.pop("NVTE_RELEASE_BUILD", None)


class _Constants(type):
    """A class with a number for every name that it is asked for, as the bindings of C++ enumerations have."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        found: int = vars(cls)[name]
        return found

    def __iter__(cls) -> Any:
        return iter(())


class _Extension(ModuleType):
    """The names defined below; every other name can be imported but not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found: Any = _Constants(name, (), {})
        else:

            def found(*_: Any, **__: Any) -> Any:
                raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in")

        setattr(self, name, found)
        return found


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    """To a dtype as TransformerEngine names it."""
    from transformer_engine.pytorch.constants import TE_DType

    return tensor if dtype is None else tensor.to(next(key for key, value in TE_DType.items() if value == dtype))


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight + 1 if zero_centered else weight


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    assert quantizer is None
    rstd = (x.square().mean(-1) + eps).rsqrt()
    y = _cast(x * rstd[:, None] * _gamma(weight, zero_centered), dtype)
    return (y if out is None else out.copy_(y)), None, rstd


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    normal = x * rstd[:, None]
    scaled = grad * _gamma(weight, zero_centered)
    return (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd[:, None], (grad * normal).sum(0)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    assert quantizer is None
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + eps).rsqrt()
    y = _cast((x - mean[:, None]) * rstd[:, None] * _gamma(weight, zero_centered) + bias, dtype)
    return (y if out is None else out.copy_(y)), mean, rstd


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normal = (x - mean[:, None]) * rstd[:, None]
    scaled = grad * _gamma(weight, zero_centered)
    rest = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
    return (scaled - rest) * rstd[:, None], (grad * normal).sum(0), grad.sum(0)


def _product(left: Tensor, left_transposed: bool, right: Tensor, right_transposed: bool) -> Tensor:
    """``op(right) @ op(left)``: the arguments are those of a library that keeps matrices by columns."""
    a, b = (one.reshape(-1, one.shape[-1]) for one in (left, right))
    found = (b.T if right_transposed else b) @ (a.T if left_transposed else a)
    return found if right_transposed else found.reshape(*right.shape[:-1], found.shape[-1])


def generic_gemm(
    left: Tensor,
    left_transposed: bool,
    right: Tensor,
    right_transposed: bool,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    assert quantizer is None
    assert not gelu
    assert comm_overlap is None
    assert alpha == 1.0
    found = _product(left, left_transposed, right, right_transposed)
    grad_bias = None
    if bias is not None and grad:
        grad_bias = right.reshape(-1, right.shape[-1]).sum(0)
    elif bias is not None:
        found = found + bias
    if out is None:
        return _cast(found, dtype), grad_bias, None, None
    return (out.add_(found) if accumulate else out.copy_(found)), grad_bias, None, None


def te_general_grouped_gemm(
    left: list[Tensor],
    left_transposed: bool,
    right: list[Tensor],
    right_transposed: bool,
    out: list[Tensor],
    dtype: Any,
    splits: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: list[Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *_: Any,
) -> list[Tensor]:
    outs = list(torch.split(out[0], list(map(int, splits)))) if single_output else out
    for a, b, own, own_bias in zip(left, right, outs, bias, strict=True):
        found = _product(a, left_transposed, b, right_transposed)
        if own_bias.numel() and grad:
            own_bias.copy_(b.sum(0))
        elif own_bias.numel():
            found = found + own_bias
        if accumulate:
            own.add_(found)
        else:
            own.copy_(found)
    return bias


def get_fused_attn_backend(*_: Any, **__: Any) -> Any:
    return extension.NVTE_Fused_Attn_Backend(-1)


_DTYPES = ("Byte", "Int32", "Float32", "Float16", "BFloat16", "Float8E4M3", "Float8E5M2", "Float4E2M1")
extension = _Extension("transformer_engine_torch")
extension.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
vars(extension).update(
    {
        one.__name__: one
        for one in (
            *(rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd),
            *(generic_gemm, te_general_grouped_gemm, get_fused_attn_backend),
        )
    },
    NVTE_Fused_Attn_Backend=enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    ),
    DType=enum.IntEnum("DType", [f"k{name}" for name in _DTYPES]),
    get_num_cublas_streams=lambda: 4,
    get_cudnn_version=lambda: 91600,
    get_cublasLt_version=lambda: 130000,
    get_stream_priority_range=lambda *_: (0, 0),
    device_supports_multicast=lambda *_: False,
    ubuf_built_with_mpi=lambda: False,
)
sys.modules["transformer_engine_torch"] = extension
# It needs onnxscript, and only export to ONNX needs it.
sys.modules["transformer_engine.pytorch.onnx_extensions"] = _Extension("transformer_engine.pytorch.onnx_extensions")


def _asked_by_transformer_engine() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformer_engine.")


def _is_cuda(tensor: Tensor) -> bool:
    return _asked_by_transformer_engine() or tensor.device.type == "cuda"


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Report a Hopper to only TransformerEngine as its tensors' device; within the emulation for Megatron."""
    available, current = torch.cuda.is_available, torch.cuda.current_device
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.Tensor, "is_cuda", property(_is_cuda)),
            (torch.cuda, "is_available", lambda: _asked_by_transformer_engine() or available()),
            (torch.cuda, "current_device", lambda: 0 if _asked_by_transformer_engine() else current()),
            (torch.cuda, "get_device_properties", lambda *_: hopper),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            *((torch.cuda.nvtx, name, lambda *_: None) for name in ("range_push", "range_pop")),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


import transformer_engine.common  # noqa: E402

transformer_engine.common.load_framework_extension = lambda framework: None

import transformer_engine.pytorch as pytorch  # noqa: E402, F401
from transformer_engine.pytorch import constants  # noqa: E402

constants.TE_DType[torch.float64] = "float64"
