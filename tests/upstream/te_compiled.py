"""The compiled part of TransformerEngine in plain torch: the functions that its Python layers call, on a CPU.

Importing this module, before Megatron-Core, puts it in the place of ``transformer_engine_torch``. TransformerEngine's
own Python, as released, is then imported from the path and runs: its modules, their autograd functions, their calls of
matrix products and norms, their communication. Only the kernels behind them are these functions. float64 is added to
the dtypes that it knows, so that its results can be compared up to rounding.

FP8 is emulated: its quantizers' tensors hold torch's float8 numbers and the scales of their recipe, tensor-wise, by
blocks or MXFP8, and a product is that of the numbers they stand for. As on a GPU, an operand whose rows are not
multiples of 16 bytes is refused.
"""

from __future__ import annotations

import enum
import importlib.machinery
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

assert "megatron.core" not in sys.modules, "Megatron-Core looks for TransformerEngine when it is imported"
Tensor = torch.Tensor
# It loads no shared library while it is being built.
os.environ["NVTE_PROJECT_BUILDING"] = "1"
os.environ.pop("NVTE_RELEASE_BUILD", None)
os.environ["NVTE_MASKED_SOFTMAX_FUSION"] = "0"


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


def _normed(y: Tensor, out: Any, quantizer: Any) -> Any:
    if quantizer is not None:
        return quantize(y, quantizer, out)
    return y if out is None else out.copy_(y)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    rstd = (x.square().mean(-1) + eps).rsqrt()
    y = _cast(x * rstd[:, None] * _gamma(weight, zero_centered), dtype)
    return _normed(y, out, quantizer), None, rstd


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
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + eps).rsqrt()
    y = _cast((x - mean[:, None]) * rstd[:, None] * _gamma(weight, zero_centered) + bias, dtype)
    return _normed(y, out, quantizer), mean, rstd


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normal = (x - mean[:, None]) * rstd[:, None]
    scaled = grad * _gamma(weight, zero_centered)
    rest = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
    return (scaled - rest) * rstd[:, None], (grad * normal).sum(0), grad.sum(0)


_FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


class _Blocks:
    """How a quantizer, or a tensor, of blocks lays out one direction of a matrix ``[rows, columns]``."""

    def __init__(self, quantizer: Any, columnwise: bool) -> None:
        self.is_mx = type(quantizer).__name__.startswith("MX")
        block = 32 if self.is_mx else quantizer.block_len
        whole = not self.is_mx and quantizer.block_scaling_dim == 2
        self.block = (block, block) if whole else (block, 1) if columnwise else (1, block)
        self.columnwise, self.name = columnwise, "_columnwise" if columnwise else "_rowwise"
        self.turns_data = columnwise and not self.is_mx
        self.turns_scales = not self.is_mx and columnwise == whole

    def scales(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The size of a block's unit: a power of two."""
        rows, columns = (-(-n // b) for n, b in zip(x.shape, self.block, strict=True))
        padded = x.new_zeros(rows * self.block[0], columns * self.block[1])
        padded[: x.shape[0], : x.shape[1]] = x.abs()
        padded = padded.view(rows, self.block[0], columns, self.block[1])
        largest = padded.amax((1, 3)) / torch.finfo(dtype).max
        return torch.where(largest == 0, 1.0, torch.exp2(largest.log2().ceil().clamp(min=-127)))

    def spread(self, scales: Tensor, shape: Any) -> Tensor:
        """A scale for each number."""
        wide = scales.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return wide[: shape[0], : shape[1]]

    def put(self, x: Tensor, into: Any, dtype: torch.dtype) -> None:
        scales = self.scales(x, dtype)
        data = (x / self.spread(scales, x.shape)).to(dtype).view(torch.uint8)
        given = getattr(into, f"{self.name}_data")
        given.copy_((data.T if self.turns_data else data).reshape(given.shape))
        stored = getattr(into, f"{self.name}_scale_inv").zero_()
        scales = scales.T if self.turns_scales else scales
        stored[: scales.shape[0], : scales.shape[1]] = scales.log2() + 127 if self.is_mx else scales

    def take(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        data = getattr(tensor, f"{self.name}_data")
        data = data.reshape(data.shape[0], -1).T if self.turns_data else data.reshape(-1, data.shape[-1])
        scales = getattr(tensor, f"{self.name}_scale_inv")
        scales = torch.exp2(scales.double() - 127) if self.is_mx else scales
        scales = (scales.T if self.turns_scales else scales)[: -(-data.shape[0] // self.block[0])]
        return data.contiguous().view(dtype).double() * self.spread(scales, data.shape)


def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: Any, device: Any, pinned: bool = False) -> Any:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if type(quantizer).__name__.startswith("MX") and (rows % 32 or columns % 32):
        raise RuntimeError(f"MXFP8 requires tensor dims that are divisible by 32 (got shape={list(shape)})")
    metadata = quantizer.create_metadata(shape, dtype=dtype)
    inner = quantizer.alloc_tensors(shape, device=device)
    kind, given = metadata["cls"], dict(metadata["nontensor_kwargs"])
    names = {"_scale_inv": "fp8_scale_inv", "_transpose": "data_transpose"}
    given |= {names.get(name, name.removeprefix("_")): value for name, value in inner.items()}
    if kind.__name__.startswith("Float8Tensor"):
        given = {"data": None} | given
    else:
        absent = [f"{way}_{what}" for way in ("rowwise", "columnwise") for what in ("data", "scale_inv")]
        given = dict.fromkeys(absent) | given
    if metadata["is_tensor"]:
        given |= {"shape": torch.Size(shape), "dtype": given.pop("fake_dtype"), "device": device}
    return kind(**given)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """The tensor ``[..., columns]`` in FP8, in the directions that its quantizer is used in."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, list(tensor.shape), tensor.dtype, tensor.device)
    x, dtype = tensor.detach().reshape(-1, tensor.shape[-1]).float(), _FP8[quantizer.dtype.name]
    if not type(quantizer).__name__.startswith("Float8CurrentScaling"):
        for columnwise in (False, True):
            way = _Blocks(quantizer, columnwise)
            if getattr(output, f"{way.name}_data") is not None:
                way.put(x, output, dtype)
        return output
    amax = x.abs().max() if x.numel() else x.new_zeros(())
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = torch.where(amax == 0, 1.0, torch.finfo(dtype).max / amax)
    data = (x * scale).to(dtype).view(torch.uint8)
    if output._data is not None:
        output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(data.T.reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / scale)
    return output


def split_quantize(tensor: Tensor, splits: Any, quantizers: list[Any], **_: Any) -> list[Any]:
    return [quantize(*one) for one in zip(torch.split(tensor, list(map(int, splits))), quantizers, strict=True)]


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantize(grad, quantizer)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    turned = data.reshape(-1, data.shape[-1]).T.contiguous().view(data.shape[-1], *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    columnwise = getattr(tensor, "_rowwise_data", getattr(tensor, "_data", None)) is None
    return _cast(_matrix(tensor, columnwise=columnwise).view(tensor.size()), dtype)


def _matrix(tensor: Any, *, columnwise: bool) -> Tensor:
    """The numbers of an operand as ``[rows, columns]``, from the direction in which a product reads it."""
    if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_quantizer"):
        return tensor.reshape(-1, tensor.shape[-1])
    dtype = _FP8[tensor._fp8_dtype.name]
    if hasattr(tensor, "_rowwise_data"):
        found = _Blocks(tensor._quantizer, columnwise).take(tensor, dtype)
        turned = columnwise and not _is_mx(tensor)
    else:
        data = tensor._transpose if columnwise else tensor._data
        assert data is not None, "the operand has no data in this direction"
        assert not (columnwise and tensor._transpose_invalid)
        flat = data.reshape(data.shape[0], -1).T if columnwise else data.reshape(-1, data.shape[-1])
        found, turned = flat.contiguous().view(dtype).double() * tensor._scale_inv, columnwise
    if found.shape[0 if turned else 1] % 16:
        raise RuntimeError(f"leading dimension requirement for FP8 GEMM: {list(found.shape)}; caller must pad")
    return found


def _is_mx(tensor: Any) -> bool:
    return type(tensor).__name__.startswith("MX")


def fused_multi_row_padding(x: Tensor, out: Tensor, splits: list[int], padded: list[int]) -> None:
    out.zero_()
    for own, into in zip(torch.split(x, splits), torch.split(out, padded), strict=True):
        into[: len(own)] = own


def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: list[int], splits: list[int]) -> None:
    for own, into in zip(torch.split(x, padded), torch.split(out, splits), strict=True):
        into.copy_(own[: len(into)])


def _product(left: Any, left_transposed: bool, right: Any, right_transposed: bool) -> Tensor:
    """``op(right) @ op(left)``: the arguments are those of a library that keeps matrices by columns."""
    a, b = _matrix(left, columnwise=not left_transposed), _matrix(right, columnwise=right_transposed)
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    found = (b.T if right_transposed else b) @ (a.T if left_transposed else a)
    return found if right_transposed else found.reshape(*right.size()[:-1], found.shape[-1])


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
            *(create_empty_quantized_tensor, quantize, split_quantize, bgrad_quantize, dequantize, fp8_transpose),
            *(fused_multi_row_padding, fused_multi_row_unpadding),
        )
    },
    NVTE_Fused_Attn_Backend=enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    ),
    DType=enum.IntEnum("DType", [f"k{name}" for name in _DTYPES]),
    FP8FwdTensors=enum.IntEnum(
        "FP8FwdTensors", [f"GEMM{n}_{one}" for n in (1, 2, 3) for one in ("INPUT", "WEIGHT", "OUTPUT")], start=0
    ),
    FP8BwdTensors=enum.IntEnum(
        "FP8BwdTensors", [f"{one}{n}" for n in (1, 2, 3) for one in ("GRAD_OUTPUT", "GRAD_INPUT")], start=0
    ),
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
            (torch.distributed, "_coalescing_manager", lambda **_: nullcontext()),  # gloo has none
            *((torch.cuda.nvtx, name, lambda *_: None) for name in ("range_push", "range_pop")),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


# Settings of a recipe that trains such layers.
RECIPE = (
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.kv_channels=16",
    "model.dtype=bfloat16",
    "model.transformer_impl=transformer_engine",
    "model.transformer.attention_backend=unfused",
    "model.transformer.init_method_std=0.3",  # attention is sharp: a wrong position shows
)


@contextmanager
def in_sessions(*more: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Give the sessions of recipes this GPU, torch's optimizer, and ``more`` contexts."""
    import megatron.core.optimizer

    from mcore_prefix_tree.mcore.loop import session

    emulation = session.cpu_emulation

    @contextmanager
    def with_gpu(**settings: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for context in (partial(emulation, **settings), on_a_gpu, *more):
                stack.enter_context(context())
            yield

    with (
        mock.patch.object(session, "cpu_emulation", with_gpu),
        mock.patch.object(megatron.core.optimizer, "Adam", torch.optim.AdamW),
    ):
        yield


import transformer_engine.common  # noqa: E402

transformer_engine.common.load_framework_extension = lambda framework: None

import transformer_engine.pytorch as pytorch  # noqa: E402, F401
from transformer_engine.pytorch import constants, quantization  # noqa: E402

constants.TE_DType[torch.float64] = "float64"
# Each recipe needs another GPU, or a release of CUDA.
quantization._FP8_BLOCK_SCALING_SUPPORT = quantization._MXFP8_SUPPORT = (True, "")
