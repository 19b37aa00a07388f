"""A hybrid stack of megatron-core's local layers: upstream's own ``hybrid_stack_spec`` is TransformerEngine's.

``--spec mcore_prefix_tree.cpu.hybrid hybrid_stack`` names it to Megatron-LM. It needs megatron-core 0.18 or later.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec
from megatron.core.post_training.modelopt.layers import Norm as TransformerEngineNorm
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_prefix_tree.cpu.specs import LatentDotProductAttention, Norm, exchanged

_LATENT_PROJECTIONS = [f"linear_{name}_proj" for name in ("q", "q_down", "q_up", "kv_down", "kv_up")]


class LocalHybridStack(HybridStack):  # type: ignore[misc]
    """``HybridStack`` with a final norm of PyTorch; upstream takes TransformerEngine's, regardless of the spec."""

    def __init__(
        self, config: Any, *args: Any, post_layer_norm: bool = True, post_process: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, post_process=post_process, **kwargs)
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)


def _local_layers() -> Any:
    """Return upstream's local layers for ModelOpt, with PyTorch's norms and MLA, and TransformerEngine's keys."""
    local = get_hybrid_stack_modelopt_spec(local_core_attention=True, remap_te_layernorm=True)
    layers = exchanged(local.submodules, {TransformerEngineNorm: Norm})
    layers = dataclasses.replace(layers, mlp_layer=dataclasses.replace(layers.mlp_layer, module=MLPLayer))
    if "mla_layer" not in {field.name for field in dataclasses.fields(HybridStackSubmodules)}:
        return layers  # it came with megatron-core 0.19
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention

    attention = layers.attention_layer
    own = attention.submodules.self_attention
    return dataclasses.replace(
        layers,
        dsa_layer=exchanged(layers.dsa_layer, {MLASelfAttention: AbsorbedMLASelfAttention}),  # as TransformerEngine's
        mla_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=dataclasses.replace(
                attention.submodules,
                sharded_state_dict_keys_map={},  # TransformerEngine's also projects latents after a separate norm
                self_attention=ModuleSpec(
                    module=MLASelfAttention,
                    params=own.params,
                    submodules=MLASelfAttentionSubmodules(
                        **dict.fromkeys(_LATENT_PROJECTIONS, own.submodules.linear_qkv),
                        core_attention=exchanged(
                            own.submodules.core_attention, {DotProductAttention: LatentDotProductAttention}
                        ),
                        linear_proj=own.submodules.linear_proj,
                        q_layernorm=IdentityOp,
                        kv_layernorm=IdentityOp,
                    ),
                ),
            ),
        ),
    )


hybrid_stack = ModuleSpec(module=LocalHybridStack, submodules=_local_layers())
