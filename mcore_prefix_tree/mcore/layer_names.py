"""Names of megatron-core that kinds of layers rely on, as those of :mod:`mcore_prefix_tree.mcore.compat`."""

from __future__ import annotations

import importlib.util

from mcore_prefix_tree.mcore.probe import Uses

_DELTA_NET = "megatron.core.ssm.gated_delta_net"
_SPARSE = "megatron.core.transformer.experimental_attention_variant"

# engine/layer_graphs.py, whose layers also replace cuda_graphs and _should_call_te_cudagraph.
_GRAPHS = "megatron.core.transformer.cuda_graphs"
_CALCULATOR = "megatron.core.num_microbatches_calculator"
GRAPHS = (
    Uses(f"{_GRAPHS}:TECudaGraphHelper", "model config seq_length micro_batch_size optimizers"),
    Uses(f"{_GRAPHS}:TECudaGraphHelper.create_cudagraphs"),
    Uses("megatron.core.transformer.module:GraphableMegatronModule", attributes="cuda_graphs"),
    Uses(
        f"{_CALCULATOR}:init_num_microbatches_calculator",
        keywords="rank global_batch_size micro_batch_size data_parallel_size",
    ),
    Uses(f"{_CALCULATOR}:unset_num_microbatches_calculator"),
    Uses("megatron.core.parallel_state:get_data_parallel_world_size"),
)

# Only where has_delta_net(): TreeDeltaNetMixin, which stands before GatedDeltaNet of megatron-core 0.19 and later.
DELTA_NET = (
    Uses(
        f"{_DELTA_NET}:GatedDeltaNet",
        "config submodules layer_number",
        attributes="A_log act_fn activation conv1d conv_kernel_dim dt_bias feat_dim_split gated_delta_rule in_proj "
        "out_norm out_proj recompute_norm_out tp_group tp_size value_head_dim",
    ),
    Uses(f"{_DELTA_NET}:GatedDeltaNet.forward", "hidden_states attention_mask", "packed_seq_params"),
    Uses(f"{_DELTA_NET}:GatedDeltaNet._gated_norm_and_a2a", "core_attn_out gate thd_cp_a2a_inv batch seq_len"),
    Uses(f"{_DELTA_NET}:torch_chunk_gated_delta_rule", "q k v g beta", "initial_state output_final_state"),
    *(Uses(f"{_DELTA_NET}:{name}") for name in ("common.HAVE_FLA", "gdn.causal_conv1d")),
    Uses("megatron.core.tensor_parallel:reduce_from_tensor_model_parallel_region", "input_", "group"),
    Uses("megatron.core.tensor_parallel.random:CheckpointWithoutOutput", keywords="fp8"),
    Uses("megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint", "run_function"),
)

# Since megatron-core 0.20 one method makes all inputs of its rule (True); before, two do.
_INPUTS = f"{_DELTA_NET}:GatedDeltaNet._prepare_input_for_gated_delta_rule"
DELTA_NET_INPUTS = {
    True: (Uses(_INPUTS, "qkv gate A_log_local_cp dt_bias_local_cp batch seq_len gate_feats"),),
    False: (
        Uses(_INPUTS, "qkv gate batch seq_len gate_feats"),
        Uses(f"{_DELTA_NET}:GatedDeltaNet._compute_g_and_beta", "A_log_local_cp dt_bias_local_cp alpha beta"),
    ),
}

# Only where has_sparse_attention(): TreeSparseAttentionMixin, which stands before DSAttention.
SPARSE_ATTENTION = (
    Uses(
        f"{_SPARSE}.dsa:DSAttention",
        "config",
        attributes="config indexer index_share index_topk layer_number pg_collection skip_topk softmax_scale "
        "source_layer",
    ),
    Uses(
        f"{_SPARSE}.dsa:DSAttention.forward",
        "query key value attention_mask x qr",
        "packed_seq_params up_v_weight",
    ),
    Uses(f"{_SPARSE}.dsa:DSAttention._get_index_share_topk_holder", "packed_seq_params"),
    Uses(f"{_SPARSE}.dsa:DSAIndexer", attributes="rotary_pos_emb"),
    Uses(f"{_SPARSE}.dsa:DSAIndexer.forward_before_topk", "x qr packed_seq_params"),
    Uses(f"{_SPARSE}.dsa:DSAIndexerLossAutoScaler"),
    Uses(f"{_SPARSE}.dsa:DSAIndexerLossLoggingHelper.save_loss_to_tracker", keywords="layer_number num_layers"),
    Uses(f"{_SPARSE}.dsa:_compute_index_scores", "q weights k", "use_relu"),
    Uses(f"{_SPARSE}.dsa:is_dsa_skip_topk_layer", "layer_number skip_topk_offset topk_freq"),
    Uses(f"{_SPARSE}.dsa_indexer_loss:indexer_kl_per_row", "target predict_log_probs"),
    Uses(f"{_SPARSE}.dsa_indexer_loss:normalize_indexer_target", "target"),
    Uses(f"{_SPARSE}.dsa_masking:masked_log_softmax", "logits valid_mask"),
    Uses(f"{_SPARSE}.dsa_masking:masked_softmax", "logits valid_mask"),
    Uses(f"{_SPARSE}.dsa_kernels:use_fused_dsa_kernels", "config"),
    Uses(
        f"{_SPARSE}.dsa_kernels:run_fused_absorbed_sparse_attention",
        "config query key topk_indices softmax_scale v_channels",
    ),
    Uses(f"{_SPARSE}.absorbed_mla:AbsorbedMLASelfAttention", "config submodules layer_number"),
    Uses(
        "megatron.core.transformer.transformer_config:TransformerConfig",
        keywords="dsa_indexer_loss_coeff dsa_indexer_scoring_relu dsa_indexer_use_sparse_loss",
    ),
)


def has_delta_net() -> bool:
    """Return whether this megatron-core has a Gated DeltaNet whose rule can start from a state: 0.19 and later."""
    found = importlib.util.find_spec(_DELTA_NET)
    return found is not None and found.submodule_search_locations is not None


def has_sparse_attention() -> bool:
    """Return whether this megatron-core has a sparse attention that takes any mask: 0.19 and later."""
    return importlib.util.find_spec(_SPARSE) is not None and bool(importlib.util.find_spec(f"{_SPARSE}.dsa_masking"))
