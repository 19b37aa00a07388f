"""Layer specs, attention and settings of stock megatron-core on a CPU.

Its local layers lack TransformerEngine's classes for norms under sequence parallelism and for attention with
multi-latent heads, but not their arithmetic. A spec that is built under emulation has those classes exchanged.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

_KINDS: dict[str, Any] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class Norm:
    """A class that a spec names: builds the norm of PyTorch that ``config.normalization`` sets."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """Return the norm in ``config.params_dtype``; raise ValueError for another norm or zero-centered weights."""
        if config.normalization not in _KINDS:
            raise ValueError(f"normalization={config.normalization!r} is not supported: use 'RMSNorm' or 'LayerNorm'")
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma is not supported by the norms of PyTorch: turn it off")
        norm = _KINDS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """``DotProductAttention`` with the sizes of a head that ``MultiLatentAttention`` gives, and its output's size."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


class PackedAttention(torch.nn.Module):
    """Causal core attention for packed rows, one call of torch's scaled dot-product attention for each row.

    It replaces ``TEDotProductAttention`` in local layers; construction raises NotImplementedError for dropout, a
    sliding window or an unusual softmax.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.config = config
        for name, usual in (("attention_dropout", 0), ("window_size", None), ("softmax_type", "vanilla")):
            if getattr(config, name, usual) != usual:
                raise NotImplementedError(f"PackedAttention does not support {name}={getattr(config, name)!r}")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return ``[T, heads * size]`` for ``[T, heads, size]``, with padding; ``[n, b, ...]`` without packing."""
        if packed_seq_params is None:
            rows = [self._attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)))]
            return rows[0].permute(2, 0, 1, 3).flatten(2)
        params, rows = packed_seq_params, []
        slots = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        for start, end in pairwise(slots.tolist()):
            # Torch's fused kernel takes four dimensions only.
            parts = (part[start:end].transpose(0, 1).unsqueeze(0) for part in (query, key, value))
            rows.append(self._attend(*parts).squeeze(0).transpose(0, 1))
        return torch.cat(rows).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return ``[n, b, heads * size]`` for ``[n, b, heads, size]``."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


S = TypeVar("S")


def exchanged(spec: S, classes: Mapping[type, type]) -> S:
    """Return a copy of a spec with the classes of a table replaced, at any depth.

    It is a ``ModuleSpec``, a dataclass of submodules, a newer megatron-core's ``functools.partial``, or a list of them.
    """
    result: Any = spec
    if isinstance(result, type):
        result = classes.get(result, result)
    elif isinstance(result, list):
        result = [exchanged(item, classes) for item in result]
    elif isinstance(result, ModuleSpec):
        changed = copy.copy(result)
        changed.module = exchanged(result.module, classes)
        changed.submodules = exchanged(result.submodules, classes)
        result = changed
    elif isinstance(result, functools.partial):
        keywords = {name: exchanged(value, classes) for name, value in result.keywords.items()}
        result = functools.partial(result.func, *result.args, **keywords)
    elif is_dataclass(result) and not isinstance(result, type):
        parts = {part.name: getattr(result, part.name) for part in fields(result) if part.init}
        result = replace(result, **{name: exchanged(part, classes) for name, part in parts.items()})
    return result  # type: ignore[no-any-return]


def interleaving(virtual_stages: int | None, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields of a ``TransformerConfig`` that virtual pipeline stages, if any, need on this device.

    Megatron's interleaved schedule frees an output while it is being sent. A GPU's stream keeps the order, but gloo
    reads the memory when the receiver is ready, which may have other contents by then.
    """
    return {} if on_gpu or virtual_stages is None else {"deallocate_pipeline_outputs": False}


def cpu_spec(spec: Any, config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Return local layers that run without a GPU under any configuration; the same spec if they do already.

    ``spec`` is that of a layer, a block or multi-token prediction.

    Under sequence parallelism the result is a complete block: a layer's spec cannot set the final norm of the block,
    and Megatron takes ``WrappedTorchNorm`` then. So it is with Gated DeltaNet and sparse attention, which upstream
    has no local layers of. A layer is repeated as often as this stage has layers.
    """
    if config.multi_latent_attention:
        spec = exchanged(spec, {DotProductAttention: LatentDotProductAttention})
    variant = _VARIANTS.get(config.experimental_attention_variant)
    if not (config.sequence_parallel or variant):
        return spec
    spec = exchanged(spec, {WrappedTorchNorm: Norm})
    if isinstance(spec, MultiTokenPredictionBlockSubmodules):
        return spec
    if isinstance(spec, ModuleSpec):
        if not isinstance(spec.submodules, TransformerBlockSubmodules):
            layers = [spec] * get_num_layers_to_build(config, vp_stage)
            spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
        else:
            spec = spec.submodules
    return variant(spec, config, vp_stage) if variant else spec


def _with_attention(layer: Any, attention: ModuleSpec, keys: Mapping[str, str]) -> Any:
    submodules = replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map=keys)
    return replace(layer, submodules=submodules)


def _with_delta_nets(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return a block with Gated DeltaNet in place of attention where ``linear_attention_freq`` has it."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear),
    )
    keys = {
        "input_layernorm.": "self_attention.in_proj.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _with_attention(layer, delta_net, keys)
        if has_state and not issubclass(layer.submodules.self_attention.module, GatedDeltaNet)
        else layer
        for layer, has_state in zip(block.layer_specs, get_linear_attention_pattern(config)[first:], strict=False)
    ]
    return replace(block, layer_specs=layers)


def _with_sparse_attention(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return a block with upstream's sparse attention in place of attention, on projections that all ranks hold."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.post_training.modelopt.layers import Linear

    class Backend(LocalSpecProvider):  # type: ignore[misc]
        def linear(self) -> Any:
            return Linear

        def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
            return Norm

    attention = get_dsa_module_spec_for_backend(config, Backend())
    keys = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    layers = [
        layer
        if issubclass(layer.submodules.self_attention.module, attention.module)
        else _with_attention(layer, attention, keys)
        for layer in block.layer_specs
    ]
    return replace(block, layer_specs=layers)


# By experimental_attention_variant; megatron-core 0.20 makes the second name of the first.
_VARIANTS = {"gated_delta_net": _with_delta_nets, "gdn": _with_delta_nets, "dsa": _with_sparse_attention}
