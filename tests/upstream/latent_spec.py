"""For ``--spec`` of the stock run: Megatron-LM's own layers, with what they lack on a CPU (test_pretrain_latent.py)."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mcore_prefix_tree.testing.attention import LatentDotProductAttention
from mcore_prefix_tree.testing.specs import exchanged

layer = exchanged(
    get_gpt_layer_local_spec(num_experts=4, multi_latent_attention=True, normalization="RMSNorm"),
    {DotProductAttention: LatentDotProductAttention},
)
