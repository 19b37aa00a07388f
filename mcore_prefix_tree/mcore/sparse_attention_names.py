"""Names of megatron-core that sparse attention relies on, as those of :mod:`mcore_prefix_tree.mcore.compat`."""

from __future__ import annotations

import importlib.util

from mcore_prefix_tree.mcore.probe import Uses

_SPARSE = "megatron.core.transformer.experimental_attention_variant"

TABLE = (
    # TreeSparseAttentionMixin, which stands before this class.
    Uses(
        f"{_SPARSE}.dsa:DSAttention",
        "config",
        attributes="config indexer index_topk layer_number pg_collection skip_topk softmax_scale",
    ),
    Uses(
        f"{_SPARSE}.dsa:DSAttention.forward",
        "query key value attention_mask x qr",
        "attn_mask_type packed_seq_params",
    ),
    Uses(f"{_SPARSE}.dsa:DSAIndexer", attributes="rotary_pos_emb"),
    Uses(f"{_SPARSE}.dsa:DSAIndexer.forward_before_topk", "x qr packed_seq_params"),
    Uses(f"{_SPARSE}.dsa:DSAIndexerLossAutoScaler"),
    Uses(f"{_SPARSE}.dsa:DSAIndexerLossLoggingHelper.save_loss_to_tracker", keywords="layer_number num_layers"),
    Uses(f"{_SPARSE}.dsa:_compute_index_scores", "q weights k", "use_relu"),
    Uses(f"{_SPARSE}.dsa_indexer_loss:indexer_kl_per_row", "target predict_log_probs"),
    Uses(f"{_SPARSE}.dsa_indexer_loss:normalize_indexer_target", "target"),
    Uses(f"{_SPARSE}.dsa_masking:masked_log_softmax", "logits valid_mask"),
    Uses(f"{_SPARSE}.dsa_masking:masked_softmax", "logits valid_mask"),
    Uses(f"{_SPARSE}.absorbed_mla:AbsorbedMLASelfAttention", "config submodules layer_number"),
    Uses(
        "megatron.core.transformer.transformer_config:TransformerConfig",
        keywords="dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_scoring_relu dsa_indexer_use_sparse_loss "
        "dsa_kernel_backend",
    ),
)


def are_there() -> bool:
    """Return whether this megatron-core has a sparse attention that takes any mask: 0.19 and later."""
    return importlib.util.find_spec(_SPARSE) is not None and bool(importlib.util.find_spec(f"{_SPARSE}.dsa_masking"))
