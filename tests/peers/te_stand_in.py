"""TransformerEngine's layers in plain torch: its linear layers and norms, on a CPU.

Importing this module puts it in TransformerEngine's place, before anything imports Megatron-Core: its wrappers
(for example ``TEColumnParallelLinear``) are then subclasses of these. Attention is omitted: a folded
micro-batch never reaches TransformerEngine's.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

assert "megatron.core" not in sys.modules, "Megatron-Core looks for TransformerEngine when it is imported"
VERSION = "2.9.0"


class Package(ModuleType):
    """A package with some members, and an empty class for every other name that begins with a capital."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        vars(self).update(members, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else Package(f"{self.__name__}.{name}")


class _Norm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(normalized_shape, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    @property
    def gamma(self) -> torch.Tensor:
        return self.weight + 1 if self.zero_centered_gamma else self.weight


class RMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.gamma, self.eps)


class LayerNorm(_Norm):
    def __init__(self, normalized_shape: int, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = self.weight.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.gamma, self.bias, self.eps)


class Linear(torch.nn.Module):
    """``column`` splits the rows of the weight over ranks, ``row`` its columns, None nothing."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.parallel_mode, self.return_bias, self.group = parallel_mode, return_bias, tp_group if tp_size > 1 else None
        self.sequence_parallel = sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
        torch.nn.init.normal_(self.weight, std=0.02)
        self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=params_dtype)) if bias else None
        if self.bias is not None and parallel_mode == "row":
            self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        # The norm of all gradients counts what is not marked once for all ranks.
        for split in (self.weight, self.bias if parallel_mode == "column" else None):
            if split is not None and parallel_mode is not None:
                split.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core import tensor_parallel as tp

        if self.parallel_mode == "column" and self.group is not None:
            if self.sequence_parallel:
                x = tp.gather_from_sequence_parallel_region(x, group=self.group)
            else:
                x = tp.copy_to_tensor_model_parallel_region(x, group=self.group)
        out = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.group is not None:
            if self.sequence_parallel:
                out = tp.reduce_scatter_to_sequence_parallel_region(out, group=self.group)
            else:
                out = tp.reduce_from_tensor_model_parallel_region(out, group=self.group)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    """A norm, and the linear layer behind it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm", "no family here has another"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, dtype=self.weight.dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        gamma = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        return super().forward(F.rms_norm(x, gamma.shape, gamma, self.eps))


class GroupedLinear(torch.nn.Module):
    """A linear layer for each expert; tensor parallelism of experts is the dispatcher's."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.in_features, self.out_features, self.tp_size = in_features, out_features, tp_size
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.nn.init.normal_(weight, std=0.02)))
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """Called when a state is loaded."""

    def get_extra_state(self) -> torch.Tensor:
        """Return what TransformerEngine saves of a layer without FP8; Megatron-Core asks for it by name."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or not state.numel()

    def forward(self, x: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        parts = zip(torch.split(x, list(map(int, m_splits))), range(self.num_gemms), strict=True)
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        added: list[Any] = [None] * self.num_gemms if biases is None or self.return_bias else biases
        out = torch.cat([F.linear(part, getattr(self, f"weight{i}"), added[i]) for part, i in parts])
        return (out, biases) if self.return_bias else out


class DotProductAttention(torch.nn.Module):
    def __init__(self, num_attention_heads: int, tp_size: int = 1, softmax_type: str = "vanilla", **_: Any) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("TransformerEngine's attention has no stand-in: the micro-batch is not folded")


def _nothing(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("TransformerEngine's FP8 and fused kernels have no stand-in")


_FUSED = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")


pytorch = Package(
    "transformer_engine.pytorch",
    **{kind.__name__: kind for kind in (RMSNorm, LayerNorm, Linear, LayerNormLinear, GroupedLinear)},
    DotProductAttention=DotProductAttention,
    fp8=Package(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=type("FP8GlobalStateManager", (), {}),
        fp8_autocast=_nothing,
        fp8_model_init=_nothing,
    ),
    tensor=Package("transformer_engine.pytorch.tensor"),
    router=Package("transformer_engine.pytorch.router", **dict.fromkeys(_FUSED, _nothing)),
)
sys.modules |= {
    "transformer_engine": Package("transformer_engine", pytorch=pytorch, __version__=VERSION),
    "transformer_engine.pytorch": pytorch,
    # Nothing else can be imported: Megatron-Core falls back as it does with an older release.
    **{f"transformer_engine.pytorch.{name}": getattr(pytorch, name) for name in ("fp8", "router", "tensor")},
}
