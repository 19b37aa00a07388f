"""Layers with which Megatron-Bridge's models compute what transformers' do, tree-capable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

from mcore_prefix_tree.cpu.specs import exchanged
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.seam.bridge_provider import provided_spec
from mcore_prefix_tree.mcore.seam.core_attention import tree_class
from mcore_prefix_tree.mcore.seam.latent_attention import TreeLatentAttentionMixin

# Epsilon of the norms in latent attention: transformers' models leave it at their norms' default.
_LATENT_EPSILON = 1e-6


def engine_layers(given: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return a provider's layer spec, tree-capable; the norms behind its linear layers have the model's epsilon."""
    compat.check(compat.TRANSFORMER_ENGINE)
    from megatron.bridge.models.common.te_layers import TERowParallelLinearLayerNorm as Given

    return exchanged(provided_spec(given, config, vp_stage), {Given: _with_epsilon(Given)})


@cache
def _with_epsilon(base: Any) -> type:
    """Return Megatron-Bridge's linear layer with a norm behind it (Gemma), with the model's epsilon instead of 1e-5."""

    def __init__(self: Any, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        from megatron.core.extensions.transformer_engine import TENorm

        base.__init__(self, input_size, output_size, config=config, **options)
        self.post_layernorm = TENorm(config, output_size, eps=config.layernorm_epsilon)

    # The name stays: Megatron-Bridge recognises the layers whose weights it converts by their classes' names.
    return type(base.__name__, (base,), {"__init__": __init__, "__doc__": base.__doc__, "__module__": __name__})


def latent_layers(layers: Callable[..., Any], config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec that a function gives, with transformers' epsilon in the norms of latent attention."""
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention

    stock = (MLASelfAttention, FusedMLASelfAttention, AbsorbedMLASelfAttention)
    classes = [tree_class(TreeLatentAttentionMixin, one) for one in stock]
    return exchanged(layers(config, vp_stage=vp_stage), {one: _with_latent_epsilon(one) for one in classes})


@cache
def _with_latent_epsilon(base: type) -> type:
    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        own = copy.copy(config)  # only latent norms are inside this layer
        own.layernorm_epsilon = _LATENT_EPSILON
        base.__init__(self, own, *args, **options)  # type: ignore[misc]

    names = {"__init__": __init__, "__doc__": base.__doc__, "__module__": __name__}
    return type(base.__name__, (base,), names)
