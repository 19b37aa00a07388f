"""Names of megatron-core that multi-token prediction relies on, as those of :mod:`mcore_prefix_tree.mcore.compat`."""

from __future__ import annotations

from functools import cache

from mcore_prefix_tree.mcore.probe import Uses, find_missing

_MODULE = "megatron.core.transformer.multi_token_prediction"
_LOGGED = f"{_MODULE}:MTPLossLoggingHelper"

# Its losses can be left to a subclass of the model.
NEEDED = "megatron-core 0.19 or later"
TABLE = (
    # TreeMultiTokenLayerMixin, which stands before this class; it takes parameters from its block unchanged.
    Uses(f"{_MODULE}:MultiTokenPredictionLayer", attributes="config layer_number tp_group"),
    Uses(f"{_MODULE}:MultiTokenPredictionLayer.forward", keywords="packed_seq_params"),
    Uses(
        f"{_MODULE}:MultiTokenPredictionLayer._get_embeddings",
        "input_ids position_ids embedding hidden_states packed_seq_params padding_mask",
    ),
    Uses(f"{_MODULE}:MultiTokenPredictionLayerSubmodules", keywords="mtp_model_layer"),
    Uses(
        f"{_MODULE}:MultiTokenPredictionBlock.forward",
        keywords="input_ids position_ids hidden_states attention_mask padding_mask rotary_pos_emb rotary_pos_cos "
        "rotary_pos_sin packed_seq_params sequence_len_offset embedding",
    ),
    # TreeMultiTokenModelMixin, which gives it no ids to roll.
    Uses(f"{_MODULE}:process_mtp_loss", keywords="labels input_ids hidden_states"),
    Uses("megatron.core.models.gpt:GPTModel", keywords="mtp_block_spec", attributes="mtp mtp_process pg_collection"),
    Uses(f"{_MODULE}:MultiTokenPredictionBlock", "config spec", "vp_stage pg_collection", "layers"),
    Uses(
        "megatron.core.models.gpt:GPTModel._postprocess",
        keywords="hidden_states input_ids position_ids labels rotary_pos_emb rotary_pos_cos rotary_pos_sin "
        "mtp_in_postprocess attention_mask padding_mask packed_seq_params sequence_len_offset runtime_gather_output "
        "extra_block_kwargs",
    ),
    Uses(f"{_MODULE}:MTPLossAutoScaler"),
    Uses(f"{_LOGGED}.save_metrics_to_tracker", keywords="correct total layer_number num_layers avg_group"),
    Uses("megatron.core.parallel_state:get_data_parallel_group", keywords="with_context_parallel"),
    Uses("megatron.core.tensor_parallel:scatter_to_sequence_parallel_region", "input_", "group"),
    Uses(
        "megatron.core.transformer.transformer_config:TransformerConfig",
        keywords="mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads",
    ),
)


@cache
def are_there() -> bool:
    """Return whether this megatron-core has all of them."""
    return not [one for uses in TABLE for one in find_missing(uses)]
