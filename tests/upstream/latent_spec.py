"""For ``--spec``: Megatron-LM's own local layers for multi-latent attention, with the attention that they lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcore_prefix_tree.cpu.dot_product import LatentDotProductAttention
from mcore_prefix_tree.cpu.specs import exchanged
from mcore_prefix_tree.mcore.release import HAS_SPARSE_ATTENTION


def _layer(**options: Any) -> Any:
    local = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm", **options)
    return exchanged(local, {DotProductAttention: LatentDotProductAttention})


def _sparse_layer() -> Any:
    from mcore_prefix_tree.cpu.specs import _with_sparse_attention

    sizes: Any = SimpleNamespace(
        multi_latent_attention=True, qk_l2_norm=False, qk_layernorm=False, normalization="RMSNorm"
    )
    block = TransformerBlockSubmodules(layer_specs=[dense_layer])
    return _with_sparse_attention(block, sizes, None).layer_specs[0]


dense_layer = _layer()
expert_layer = _layer(num_experts=4)
if HAS_SPARSE_ATTENTION:
    sparse_layer = _sparse_layer()
