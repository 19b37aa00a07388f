"""For ``--spec``: Megatron-LM's own local layers for multi-latent attention, with the attention that they lack."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mcore_prefix_tree.cpu.specs import LatentDotProductAttention, exchanged


def _layer(**options: Any) -> Any:
    local = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm", **options)
    return exchanged(local, {DotProductAttention: LatentDotProductAttention})


dense_layer = _layer()
expert_layer = _layer(num_experts=4)
