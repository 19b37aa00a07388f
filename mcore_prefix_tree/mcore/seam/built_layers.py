"""Layers that are built already, and follow trees from then on.

Megatron-Bridge's Qwen3-VL, Qwen3.5-VL and Gemma 4 without experts make the specs of their layers themselves, and take
no other. Each module gets a subclass of its class, as torch's ``fully_shard`` does; parameters, state-dict keys and the
names of classes stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_prefix_tree.mcore.seam.core_attention import TreeCoreAttentionMixin, TreeSelfAttentionMixin, tree_class
from mcore_prefix_tree.mcore.seam.experts import TreeExpertLayerMixin, TreeExpertsMixin, TreeRouterMixin
from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_DELTA_NET
from mcore_prefix_tree.mcore.seam.packed_seq_params import get_tree_params
from mcore_prefix_tree.mcore.seam.validation import check_config

_Follow = Callable[[Any, Any], None]


class TreeFlatAttentionMixin(TreeSelfAttentionMixin):
    """Self-attention of Megatron-Bridge's Qwen3-VL: with any ``packed_seq_params``, queries have no batch's dimension.

    Its rotary embeddings, ``[P, 1, 1, dim]``, have a row for each token.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base class, which turns queries ``[P, H, D]`` by rows ``[P, 1, dim]`` if there is a tree."""
        if rotary_pos_emb is not None and get_tree_params(packed_seq_params) is not None:
            rotary_pos_emb = rotary_pos_emb.squeeze(1)
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


def names_own_layers(config: Any) -> bool:
    """Return whether a configuration is Megatron-Bridge's of Gemma 4 without experts, whose model ignores any spec."""
    return hasattr(config, "num_global_query_groups")


def follow_trees(model: Any) -> None:
    """Let the layers of a built model follow trees: self-attention, Gated DeltaNet and experts. Others stay.

    Raises:
        ImportError: Gated DeltaNet lacks functions that a tree needs.
        NotImplementedError: a setting is not supported; see :func:`check_config`. Or Megatron-Bridge's own layers fail
            with it, or get wrong gradients.
    """
    check_config(model.config)
    _check_own_layers(model.config)
    for module in list(model.modules()):
        if not isinstance(module, TransformerLayer):
            continue
        for kind, follow in _KINDS.items():
            if isinstance(module.self_attention, kind):
                follow(model, module.self_attention)
        if isinstance(getattr(module.mlp, "router", None), TopKRouter):
            _change(module, TreeExpertLayerMixin)
            _change(module.mlp, TreeExpertsMixin)
            module.mlp.router = _made_again(module.mlp.router, TreeRouterMixin)


def _check_own_layers(config: Any) -> None:
    """Reject settings with which layers of Gemma 4 without experts fail, or get wrong gradients, unfolded too."""
    if not names_own_layers(config):
        return
    embeddings, shared = config.per_layer_embed_dim, config.num_kv_shared_layers
    found = None
    if embeddings and config.sequence_parallel:
        found = (
            f"sequence_parallel=True with per_layer_embed_dim={embeddings}: Megatron-Bridge does not add up gradients "
            "of per_layer_input_gate and per_layer_projection over tensor-parallel ranks; set sequence_parallel=False"
        )
    elif (embeddings or shared) and config.recompute_granularity == "full":
        found = (
            f"recompute_granularity='full' with per_layer_embed_dim={embeddings} and num_kv_shared_layers={shared}: "
            "Megatron-Bridge cannot recompute layers with embeddings of their own, nor layers that take the keys which "
            "another has kept; set recompute_granularity='selective' or None"
        )
    elif config.tensor_model_parallel_size > 1 and not config.qk_layernorm:
        found = (
            f"qk_layernorm=False with tensor_model_parallel_size={config.tensor_model_parallel_size}: Megatron-Core "
            "would not add up the gradients of the norms that these layers have anyway; set qk_layernorm=True"
        )
    if found is not None:
        raise NotImplementedError(f"prefix-tree training does not support {found}")


def _follow_attention(model: Any, attention: Any) -> None:
    is_flat = model.position_embedding_type == "mrope"  # among these models only Qwen's
    _change(attention, TreeFlatAttentionMixin if is_flat else TreeSelfAttentionMixin)
    config, core = attention.config, attention.core_attention
    _change(core, TreeCoreAttentionMixin)
    core.read_settings(config, attention.layer_number, config.softmax_scale)


_KINDS: dict[type, _Follow] = {SelfAttention: _follow_attention}
if HAS_DELTA_NET:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from mcore_prefix_tree.mcore.seam.delta_net import TreeDeltaNetMixin

    def _follow_delta_net(model: Any, layer: Any) -> None:
        _change(layer, TreeDeltaNetMixin)
        layer.prepare()

    _KINDS[GatedDeltaNet] = _follow_delta_net


def _change(module: torch.nn.Module, mixin: type) -> None:
    kind: Any = type(module)
    module.__class__ = tree_class(mixin, kind)


def _made_again(module: Any, mixin: type) -> Any:
    """Return a module with the attributes of another whose class, an abstract one's, cannot be changed in place."""
    stock: Any = type(module)
    kind: Any = tree_class(mixin, stock)
    if isinstance(module, kind):
        return module
    made = kind.__new__(kind)
    made.__dict__ = module.__dict__
    return made
