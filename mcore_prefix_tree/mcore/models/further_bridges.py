"""Bridges for families that Megatron-Bridge has none for: DeepSeek-V3.2 and Granite 4.

DeepSeek-V3.2 is GLM-5 with YaRN and another rotary embedding in its indexers.

A layer of Granite 4 is two of a ``HybridModel``: Mamba-2 or attention, then an MLP or experts. Its factors on
embeddings and logits are those of Megatron-Core's maximal update parametrisation (MuP); the factor on what a layer adds
to its residual is applied where Megatron-Core adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    MambaConv1dMapping,
    MambaInProjMapping,
    MegatronParamMapping,
    QKVMapping,
    RowParallelMapping,
)
from megatron.bridge.models.glm_moe_dsa.glm5_bridge import GLM5Bridge
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel

_SCAN = "linear_attention"
# The attributes of layers that add an output to the residual, one in each layer of a HybridModel.
_ADDITIONS = ("mamba_bda", "self_attn_bda", "mlp_bda")


@MegatronModelBridge.register_bridge(  # type: ignore[untyped-decorator]
    source="DeepseekV32ForCausalLM", target=GPTModel, provider=MLAModelProvider, model_type="deepseek_v32"
)
class DeepSeekV32Bridge(GLM5Bridge):  # type: ignore[misc]
    """Converts settings and weights of ``DeepseekV32ForCausalLM``."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return the provider of a folder's configuration, whose YaRN GLM-5's bridge would pass over."""
        provider = super().provider_bridge(hf_pretrained)
        for name, value in self.hf_config_to_provider_kwargs(hf_pretrained.config).get("_mla_rope_params", {}).items():
            setattr(provider, name, value)
        return provider


@dataclass
class GraniteProvider(HybridModelProvider):  # type: ignore[misc]
    """Provider of a ``HybridModel`` whose layers scale what they add to their residual."""

    residual_multiplier: float = 1.0

    def provide(self, *args: Any, **options: Any) -> Any:
        """Return a chunk of the model, whose layers have the factor."""
        model = super().provide(*args, **options)
        for layer in model.decoder.layers:
            (name,) = (name for name in _ADDITIONS if getattr(layer, name, None) is get_bias_dropout_add)
            setattr(layer, name, partial(_scaled_addition, self.residual_multiplier))
        return model


def _scaled_addition(factor: float, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return Megatron-Core's addition to a residual, of an output times a factor."""
    add = get_bias_dropout_add(training, fused)

    def scaled_add(output: tuple[torch.Tensor, Any], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        value, bias = output
        added: torch.Tensor = add((value * factor, None if bias is None else bias * factor), residual, dropout)
        return added

    return scaled_add


class _FusedMLP(MegatronParamMapping):  # type: ignore[misc, type-arg]
    """One matrix of gate and up projections, of which tensor-parallel ranks share each."""

    def __init__(self, megatron_param: str, hf_param: str) -> None:
        super().__init__(megatron_param, hf_param)
        self._halves = GatedMLPMapping(megatron_param, f"{hf_param}.gate", f"{hf_param}.up")

    def hf_to_megatron(self, hf_weights: torch.Tensor, megatron_module: Any) -> Any:
        gate, up = hf_weights.chunk(2)
        return self._halves.hf_to_megatron({"gate": gate, "up": up}, megatron_module)

    def megatron_to_hf(self, megatron_weights: Any, megatron_module: Any) -> dict[str, torch.Tensor]:
        halves = self._halves.megatron_to_hf(megatron_weights, megatron_module)
        return {self.hf_param: torch.cat(list(halves.values()))} if halves else {}


@MegatronModelBridge.register_bridge(  # type: ignore[untyped-decorator]
    source="GraniteMoeHybridForCausalLM", target=HybridModel, provider=GraniteProvider, model_type="granitemoehybrid"
)
class GraniteBridge(MegatronModelBridge):  # type: ignore[misc]
    """Converts settings and weights of ``GraniteMoeHybridForCausalLM``."""

    CONFIG_MAPPING: ClassVar[list[tuple[str, str]]] = [
        *MegatronModelBridge.CONFIG_MAPPING,
        ("mamba_n_heads", "mamba_num_heads"),
        ("mamba_d_head", "mamba_head_dim"),
        ("mamba_d_state", "mamba_state_dim"),
        ("mamba_n_groups", "mamba_num_groups"),
        ("mamba_chunk_size", "mamba_chunk_size"),
        ("attention_multiplier", "softmax_scale"),
        ("embedding_multiplier", "mup_embedding_mult"),
        ("residual_multiplier", "residual_multiplier"),
    ]

    def provider_bridge(self, hf_pretrained: Any) -> GraniteProvider:
        """Return the provider of a folder's configuration."""
        provider: GraniteProvider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config
        mlp = "E" if config.num_local_experts else "-"
        provider.hybrid_layer_pattern = "".join(
            ("M" if kind == _SCAN else "*") + mlp for kind in config.layers_block_type
        )
        provider.num_layers = len(provider.hybrid_layer_pattern)
        provider.position_embedding_type = "rope" if config.position_embedding_type == "rope" else "none"
        provider.use_mup, provider.mup_output_mult = True, 1.0 / config.logits_scaling
        provider.gated_linear_unit, provider.activation_func = True, torch.nn.functional.silu
        provider.ffn_hidden_size = config.shared_intermediate_size
        provider.is_hybrid_model = True
        if config.num_local_experts:
            provider.moe_ffn_hidden_size = config.intermediate_size
            provider.moe_shared_expert_intermediate_size = config.shared_intermediate_size
            provider.moe_grouped_gemm = True
        else:
            provider.num_moe_experts = None
        return provider

    def mapping_registry(self) -> Any:
        """Return the mappings between the two layers of a ``HybridModel`` and the one of a folder."""
        shared = [
            AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            AutoMapping("output_layer.weight", "lm_head.weight"),
            AutoMapping("decoder.final_norm.weight", "model.norm.weight"),
        ]
        layers = enumerate(self.hf_config.layers_block_type)
        return MegatronMappingRegistry(*shared, *(one for at, kind in layers for one in self._layer(at, kind)))

    def _layer(self, at: int, kind: str) -> list[Any]:
        """Return the mappings of a layer of the folder."""
        mixer, mlp, own = f"decoder.layers.{2 * at}.", f"decoder.layers.{2 * at + 1}.", f"model.layers.{at}."
        norms = {
            f"{mixer}norm.weight": "input_layernorm",
            f"{mixer}input_layernorm.weight": "input_layernorm",
            f"{mixer}mixer.in_proj.layer_norm_weight": "input_layernorm",
            f"{mixer}self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
            f"{mlp}pre_mlp_layernorm.weight": "post_attention_layernorm",
            f"{mlp}mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
        }
        found = [AutoMapping(name, f"{own}{other}.weight") for name, other in norms.items()]
        found += _scan(f"{mixer}mixer.", f"{own}mamba.") if kind == _SCAN else _attention(mixer, f"{own}self_attn.")
        if not self.hf_config.num_local_experts:
            return found + _mlp(f"{mlp}mlp.", f"{own}shared_mlp.")
        return found + _mlp(f"{mlp}mlp.shared_experts.", f"{own}shared_mlp.") + _experts(f"{mlp}mlp.", own)


def _scan(mixer: str, own: str) -> list[Any]:
    """Return the mappings of Mamba-2's weights."""
    split = [ColumnParallelMapping(mixer + name, own + name) for name in ("A_log", "D", "dt_bias", "norm.weight")]
    convolution = [
        MambaConv1dMapping(f"{mixer}conv1d{dot}{name}", f"{own}conv1d.{name}")
        for dot in "._"
        for name in ("weight", "bias")
    ]
    projections = [
        MambaInProjMapping(f"{mixer}in_proj.weight", f"{own}in_proj.weight"),
        RowParallelMapping(f"{mixer}out_proj.weight", f"{own}out_proj.weight"),
    ]
    return [*split, *convolution, *projections]


def _attention(mixer: str, own: str) -> list[Any]:
    """Return the mappings of attention's weights."""
    queries, keys, values = (f"{own}{name}_proj.weight" for name in "qkv")
    return [
        QKVMapping(f"{mixer}self_attention.linear_qkv.weight", q=queries, k=keys, v=values),
        AutoMapping(f"{mixer}self_attention.linear_proj.weight", f"{own}o_proj.weight"),
    ]


def _mlp(mlp: str, own: str) -> list[Any]:
    """Return the mappings of an MLP's weights."""
    return [
        _FusedMLP(f"{mlp}linear_fc1.weight", f"{own}input_linear.weight"),
        AutoMapping(f"{mlp}linear_fc2.weight", f"{own}output_linear.weight"),
    ]


def _experts(mlp: str, own: str) -> list[Any]:
    """Return the mappings of experts' weights, those of grouped and of sequential experts."""
    sparse = f"{own}block_sparse_moe."
    found: list[Any] = [AutoMapping(f"{mlp}router.weight", f"{sparse}router.layer.weight")]
    for name in ("experts.linear_{}.weight*", "experts.local_experts.*.linear_{}.weight"):
        found += [
            FusedGatedExpertMapping(mlp + name.format("fc1"), f"{sparse}input_linear.weight"),
            FusedExpertMapping(mlp + name.format("fc2"), f"{sparse}output_linear.weight"),
        ]
    return found
