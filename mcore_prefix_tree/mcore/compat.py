"""Names of megatron-core that this package relies on, and the error that lists the missing ones.

The tables name every class and function of megatron-core that this package calls, derives from or lets its own classes
stand in for, with the parameters that it passes and the attributes that it reads. They are checked only by signature
and source, when the folder that relies on them is imported: :data:`SEAM`, :data:`HYBRID` and ``layer_names`` by
``mcore_prefix_tree.mcore``, :data:`ENGINE`, :data:`PACKED`, :data:`MODELS` and :data:`LOOP` by the folders of these
names, :data:`MEGATRON_LM` before ``pretrain`` of a checkout is called, and :data:`MEGATRON_LM_RL` when its
``train_rl.py`` is imported. ``mcore-prefix-tree verify`` without a recipe checks all and prints them.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mcore_prefix_tree.mcore import layer_names, multi_token_names
from mcore_prefix_tree.mcore.probe import MegatronCoreError, Uses, find_missing, import_upstream

OLDEST = "0.16.1"
# Releases that scripts/versions tests, and the commit of Megatron-LM's main, which calls itself 0.20.0.
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
MAIN, MAIN_COMMIT = "0.20.0", "d98e8a64dd"
SUPPORTED = f"megatron-core {', '.join(RELEASES)} and {MAIN} (main at {MAIN_COMMIT}) are tested"

_ATTENTION = "megatron.core.transformer.attention"
_LATENT = "megatron.core.transformer.multi_latent_attention"
_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_TE = "megatron.core.extensions.transformer_engine:TE"
_EXPERTS = "megatron.core.transformer.moe"
_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_VARIANTS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
_STATE = "megatron.core.parallel_state"
_SAVING = "megatron.core.dist_checkpointing.strategies.torch"
_HYBRID = "megatron.core.models.hybrid"
_SSM = "megatron.core.ssm"

# The same of GPTModel and HybridModel: arguments of their forward, attributes, and those that folding inside reads too.
_FORWARD = "input_ids position_ids attention_mask labels packed_seq_params runtime_gather_output"
_MODEL = (
    "config decoder max_sequence_length output_layer position_embedding_type share_embeddings_and_output_weights "
    "shared_embedding_or_output_weight tp_group"
)
_STAGE = "post_process pp_group pre_process vocab_size vp_size vp_stage"

SEAM = (
    Uses(f"{_SPECS}:get_gpt_decoder_block_spec", "config", "use_transformer_engine normalization qk_l2_norm vp_stage"),
    Uses(f"{_VARIANTS}:get_transformer_block_with_experimental_attention_variant_spec", "config vp_stage"),
    Uses("megatron.core.transformer.torch_norm:WrappedTorchNorm"),
    # TreePackedSeqParams, a subclass; the model sizes its rotary table by max_seqlen_*.
    Uses("megatron.core.packed_seq_params:PackedSeqParams", keywords="qkv_format max_seqlen_q max_seqlen_kv"),
    Uses(
        "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len",
        keywords="packed_seq_params",
    ),
    # TreeSelfAttentionMixin, TreeLatentAttentionMixin and TreeCoreAttentionMixin, which stand before these classes.
    Uses(f"{_ATTENTION}:Attention", attributes="attn_mask_type config core_attention layer_number"),
    Uses(f"{_ATTENTION}:SelfAttention", keywords="config submodules layer_number"),
    Uses(f"{_ATTENTION}:SelfAttention.forward", "hidden_states attention_mask", "rotary_pos_emb packed_seq_params"),
    Uses(f"{_LATENT}:MultiLatentAttention", attributes="config rotary_pos_emb"),
    Uses(
        f"{_LATENT}:MLASelfAttention",
        "",
        "config submodules layer_number",
        "linear_kv_down_proj linear_kv_up_proj num_attention_heads_per_partition softmax_scale",
    ),
    Uses(
        f"{_LATENT}:MLASelfAttention.get_query_key_value_tensors",
        "hidden_states key_value_states position_ids packed_seq_params",
    ),
    Uses(_CORE, "config layer_number", "", "config softmax_offset"),
    Uses(f"{_CORE}.forward", "query key value attention_mask", "attention_bias packed_seq_params"),
    # with_prefix_tree and follow_trees, which exchange the classes of layers and of their modules.
    Uses("megatron.core.transformer.spec_utils:ModuleSpec", keywords="module params submodules"),
    Uses("megatron.core.transformer.spec_utils:get_module", "spec_or_module"),
    Uses(
        "megatron.core.transformer.transformer_layer:TransformerLayer",
        attributes="cross_attention layer_number mlp self_attention submodules_config",
    ),
    Uses("megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer"),
    Uses("megatron.core.transformer.transformer_block:TransformerBlockSubmodules", keywords="layer_specs layer_norm"),
    Uses("megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlockSubmodules"),
    Uses("megatron.core.transformer.transformer_layer:TransformerLayer", keywords="config submodules layer_number"),
    Uses("megatron.core.transformer.transformer_layer:BaseTransformerLayer"),
    Uses("megatron.core.transformer.identity_op:IdentityOp"),
    Uses(f"{_SPECS}:get_gpt_layer_local_spec", keywords="qk_layernorm normalization"),
    Uses(f"{_SPECS}:get_gpt_layer_with_transformer_engine_spec", keywords="qk_layernorm"),
    Uses("megatron.core.extensions.transformer_engine:HAVE_TE"),
    # TreeRouterMixin, TreeExpertsMixin and TreeExpertLayerMixin, which stand before the classes of experts.
    Uses(
        f"{_EXPERTS}.router:TopKRouter",
        keywords="config",
        attributes="enable_expert_bias ga_steps get_aux_loss_coeff global_tokens_per_expert layer_number "
        "local_tokens_per_expert router_replay score_function topk tp_cp_group tp_dp_cp_group",
    ),
    # GivenRoutes, which stands in for it.
    Uses(
        f"{_EXPERTS}.router_replay:RouterReplay.get_replay_topk",
        "scores topk num_groups group_topk default_compute_topk",
    ),
    Uses(f"{_EXPERTS}.moe_utils:MoEAuxLossAutoScaler"),
    Uses(f"{_EXPERTS}.moe_utils:compute_routing_scores_for_aux_loss", "logits topk score_function", "fused"),
    Uses("megatron.core.tensor_parallel:checkpoint"),
    # FP8: layers that compute in it, and the group of a recomputation.
    Uses("megatron.core.fp8_utils:TE_LINEAR_TYPES"),
    Uses("megatron.core.tensor_parallel:get_cuda_rng_tracker"),
    # The forward step, and the parts of a model that it calls.
    Uses("megatron.core.models.gpt:GPTModel.forward", keywords=_FORWARD),
    Uses("megatron.core.utils:get_attr_wrapped_model", "model attr", "return_model_obj"),
    Uses("megatron.core.utils:get_model_config", "model"),
    Uses(f"{_STATE}:get_tensor_model_parallel_world_size"),
    Uses(f"{_STATE}:get_tensor_model_parallel_rank"),
    Uses(f"{_STATE}:get_tensor_model_parallel_group"),
    Uses(f"{_STATE}:get_data_parallel_rank"),
    Uses("megatron.core.models.gpt:GPTModel", attributes=_MODEL),
    # EdgeHeadMixin, which stands before ColumnParallelLinear.
    Uses(
        "megatron.core.tensor_parallel:ColumnParallelLinear",
        attributes=(
            "bias config gradient_accumulation_fusion output_size output_size_per_partition sequence_parallel tp_group "
            "weight"
        ),
    ),
    Uses("megatron.core.tensor_parallel:ColumnParallelLinear.forward", "input_", "weight runtime_gather_output"),
    Uses(
        "megatron.core.tensor_parallel:gather_from_sequence_parallel_region",
        "input_",
        "tensor_parallel_output_grad group",
    ),
    Uses("megatron.core.tensor_parallel:copy_to_tensor_model_parallel_region", "input_", "group"),
    # ScalarHead, which stands in its place.
    Uses(
        "megatron.core.transformer.utils:make_sharded_tensors_for_checkpoint",
        "state_dict prefix",
        "sharded_offsets tp_group dp_cp_group",
    ),
    Uses(
        "megatron.core.dist_checkpointing.utils:replace_prefix_for_sharding",
        "sharded_state_dict old_prefix new_prefix",
    ),
    Uses("megatron.core.dist_checkpointing.mapping:LocalNonpersistentObject", "obj"),
    # check_config reads these settings by name.
    Uses(
        "megatron.core.transformer.transformer_config:TransformerConfig",
        keywords="apply_rope_fusion attention_dropout attention_output_gate batch_p2p_comm context_parallel_size "
        "cuda_graph_impl defer_embedding_wgrad_compute experimental_attention_variant fp4 fp8 fp8_recipe "
        "fused_single_qkv_rope hidden_dropout kv_channels log_max_attention_logit moe_aux_loss_coeff "
        "moe_expert_capacity_factor moe_input_jitter_eps moe_pad_expert_input_to_capacity "
        "moe_router_bias_update_rate moe_router_enable_expert_bias moe_router_force_load_balancing "
        "moe_router_load_balancing_type moe_router_topk "
        "moe_z_loss_coeff mtp_num_layers multi_latent_attention num_moe_experts "
        "overlap_moe_expert_parallel_comm overlap_p2p_comm pipeline_model_parallel_size qk_clip "
        "quant_recipe softmax_type use_kitchen virtual_pipeline_model_parallel_size "
        "window_attn_skip_freq window_size",
    ),
    Uses(
        "megatron.core.transformer.transformer_config:MLATransformerConfig",
        keywords="kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
    ),
    # Which layers have a window.
    Uses("megatron.core.transformer.utils:is_layer_window_attention", "window_size window_attn_skip_freq layer_number"),
)

# Only if there is a HybridModel: since megatron-core 0.18.
HYBRID = (
    Uses(f"{_HYBRID}.hybrid_block:HybridStackSubmodules"),
    Uses(f"{_HYBRID}.hybrid_layer_specs:hybrid_stack_spec"),
    # TreeStackMixin, which stands before HybridStack.
    Uses(f"{_HYBRID}.hybrid_block:HybridStack", "config submodules pre_process layer_type_list"),
    Uses(f"{_HYBRID}.hybrid_model:HybridModel.forward", keywords=_FORWARD),
    Uses(f"{_HYBRID}.hybrid_model:HybridModel", attributes=f"hybrid_layer_pattern {_MODEL} {_STAGE}"),
    Uses(f"{_HYBRID}.hybrid_model:HybridModel.set_input_tensor", "input_tensor"),
    # GraniteProvider, which scales what layers add.
    Uses("megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add", "training fused"),
    # TreeMambaMixin, which stands before MambaMixer.
    Uses(f"{_SSM}.mamba_layer:MambaLayer", attributes="layer_number mixer"),
    Uses(f"{_SSM}.mamba_mixer:MambaMixer", "config", "layer_number", "activation chunk_size cp d_state norm rmsnorm"),
    Uses(f"{_SSM}.mamba_mixer:MambaMixer._ssm_training", "zxBCdt packed_seq_params"),
    *(
        Uses(f"{_SSM}:mamba_mixer.{name}")
        for name in ("HAVE_EINOPS", "HAVE_MAMBA_SSM", "causal_conv1d_fn", "mamba_chunk_scan_combined")
    ),
    Uses(
        f"{_SSM}.mamba_context_parallel:MambaContextParallel",
        attributes="d_inner_local_tpcp get_A_log get_D get_conv1d_bias get_conv1d_weight get_dt_bias "
        "D_has_hdim ngroups_local_tpcp nheads_local_tpcp",
    ),
    Uses("megatron.core.transformer.transformer_config:TransformerConfig", keywords="use_mamba_mem_eff_path"),
    # The other latent attention of Megatron-Bridge's specs, which need a version that has hybrid models.
    Uses(f"{_LATENT}:FusedMLASelfAttention"),
)

# Only where TransformerEngine is installed.
TRANSFORMER_ENGINE = (
    Uses(f"{_TE}DotProductAttention", "config layer_number"),
    Uses(f"{_TE}DotProductAttention.forward", "query key value attention_mask", "attention_bias packed_seq_params"),
    Uses(f"{_TE}Norm", "config hidden_size eps"),
    Uses("megatron.core.extensions.transformer_engine:te_checkpoint"),
)

ENGINE = (
    *layer_names.GRAPHS,
    # Generators of Megatron's, which a comparison restores.
    Uses("megatron.core.tensor_parallel:get_cuda_rng_tracker"),
    Uses("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.get_states"),
    Uses("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states", "states"),
    Uses(f"{_STATE}:get_data_parallel_group", keywords="with_context_parallel"),
    Uses("megatron.core.process_groups_config:ProcessGroupCollection.use_mpu_process_groups"),
    Uses(f"{_STATE}:get_tensor_and_data_parallel_group", keywords="with_context_parallel"),
    *(Uses(f"{_STATE}:get_{name}") for name in ("pipeline_model_parallel_world_size", "embedding_group")),
    Uses(f"{_STATE}:get_expert_data_parallel_group"),
    Uses(f"{_STATE}:is_pipeline_last_stage", keywords="ignore_virtual"),
    Uses(f"{_STATE}:is_rank_in_embedding_group"),
    Uses("megatron.core.tensor_parallel:gather_from_tensor_model_parallel_region", "input_"),
    Uses("megatron.core.pipeline_parallel:get_forward_backward_func"),
    Uses("megatron.core.pipeline_parallel.schedules:get_schedule_table"),
    Uses("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator", keywords="pp_group config"),
    Uses(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.recv_forward", "tensor_shapes is_first_stage"
    ),
    Uses(f"{_STATE}:get_pipeline_model_parallel_group"),
    Uses(f"{_STATE}:model_parallel_is_initialized"),
    Uses(
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
        keywords="forward_step_func data_iterator model num_microbatches seq_length micro_batch_size forward_only "
        "collect_non_loss_data",
    ),
)

PACKED = (
    Uses(
        "megatron.core.models.gpt:GPTModel.forward",
        "input_ids position_ids attention_mask",
        "decoder_input labels inference_context packed_seq_params inference_params loss_mask padding_mask",
    ),
    Uses("megatron.core.models.gpt:GPTModel.set_input_tensor", "input_tensor"),
    Uses("megatron.core.models.gpt:GPTModel", attributes=_STAGE),
    # Recomputation, which a comparison in training mode switches off.
    Uses("megatron.core.transformer.transformer_config:TransformerConfig", keywords="recompute_granularity"),
    Uses("megatron.core.transformer.attention:SelfAttention", attributes="checkpoint_core_attention"),
    Uses("megatron.core.tensor_parallel:scatter_to_sequence_parallel_region", "input_", "group"),
    Uses(f"{_STATE}:get_expert_model_parallel_group"),
)

MODELS = (
    Uses(f"{_SPECS}:get_gpt_mtp_block_spec", "config spec", "use_transformer_engine vp_stage"),
    Uses(
        "megatron.core.models.gpt:GPTModel",
        "config transformer_layer_spec",
        "vocab_size max_sequence_length pre_process post_process share_embeddings_and_output_weights "
        "position_embedding_type rotary_base rotary_percent rope_scaling rope_scaling_factor vp_stage pg_collection",
    ),
    Uses(
        "megatron.core.transformer.transformer_config:TransformerConfig",
        keywords="num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size normalization "
        "gated_linear_unit activation_func add_bias_linear qk_layernorm qk_l2_norm params_dtype pipeline_dtype "
        "autocast_dtype bf16 fp16 calculate_per_token_loss tensor_model_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size sequence_parallel variable_seq_lengths use_cpu_initialization "
        "moe_token_dispatcher_type overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs "
        "masked_softmax_fusion finalize_model_grads_func grad_scale_func",
    ),
    Uses("megatron.core.transformer.module:Float16Module", "config module"),
    Uses(f"{_STATE}:is_pipeline_first_stage", keywords="ignore_virtual vp_stage"),
    Uses(f"{_STATE}:is_pipeline_last_stage", keywords="ignore_virtual vp_stage"),
    Uses("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE"),
    Uses("megatron.core.optimizer:MegatronOptimizer.sharded_state_dict", "model_sharded_state_dict", "is_loading"),
    Uses("megatron.core.dist_checkpointing:save", "sharded_state_dict checkpoint_dir sharded_strategy"),
    # WriteInRank, a subclass.
    Uses(f"{_SAVING}:TorchDistSaveShardedStrategy", "backend version"),
    Uses(f"{_SAVING}:TorchDistSaveShardedStrategy.save", "sharded_state_dict checkpoint_dir"),
    Uses(f"{_SAVING}:MCoreSavePlanner"),
    Uses(f"{_SAVING}:mcore_to_pyt_state_dict", "state_dict is_loading"),
    Uses("megatron.core.dist_checkpointing.dict_utils:nested_values", "x"),
    Uses("megatron.core.dist_checkpointing.mapping:ShardedObject"),
    Uses("megatron.core.dist_checkpointing.mapping:is_main_replica", "replica_id"),
    Uses("megatron.core.dist_checkpointing:load", "sharded_state_dict checkpoint_dir"),
    Uses("megatron.core.models.gpt:GPTModel.sharded_state_dict", keywords="metadata"),
    Uses("megatron.core.utils:unwrap_model", "model"),
    Uses("megatron.core.safe_globals:SAFE_GLOBALS"),
)

LOOP = (
    Uses(
        f"{_STATE}:initialize_model_parallel",
        keywords="tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size",
    ),
    Uses(f"{_STATE}:destroy_model_parallel"),
    Uses(f"{_STATE}:get_pipeline_model_parallel_rank"),
    Uses(f"{_STATE}:get_data_parallel_world_size"),
    Uses("megatron.core.tensor_parallel:model_parallel_cuda_manual_seed", "seed", "force_reset_rng"),
    Uses("megatron.core.distributed:DistributedDataParallel", "config ddp_config module"),
    Uses(
        "megatron.core.distributed:DistributedDataParallelConfig",
        keywords="grad_reduce_in_fp32 use_distributed_optimizer",
    ),
    Uses("megatron.core.distributed:finalize_model_grads", "model num_tokens"),
    Uses(
        "megatron.core.optimizer:OptimizerConfig",
        keywords="optimizer lr min_lr weight_decay adam_beta1 adam_beta2 clip_grad bf16 params_dtype "
        "use_distributed_optimizer",
    ),
    Uses("megatron.core.optimizer:get_megatron_optimizer", "config model_chunks"),
    Uses(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler",
        "optimizer",
        "init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps "
        "wd_incr_style use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
    ),
    Uses("megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step", keywords="increment"),
)

# Of a checkout; mcore/megatron_lm/pretrain_forms.py knows the two forms of its pretrain().
MEGATRON_LM = (
    Uses("megatron.training:get_args"),
    Uses("megatron.training:get_timers"),
    Uses("megatron.training:print_rank_0", "message"),
    Uses("megatron.training.arguments:parse_args", "extra_args_provider"),
    Uses("megatron.training.arguments:validate_args", "args defaults"),
    Uses("megatron.training.training:initialize_megatron"),
    Uses("megatron.training.training:get_model", "model_provider_func model_type wrap_with_ddp"),
    Uses("megatron.training.arguments:core_transformer_config_from_args", "args"),
    Uses("megatron.training.checkpointing:load_args_from_checkpoint", "args"),
    Uses("megatron.training.checkpointing:load_checkpoint", "ddp_model optimizer opt_param_scheduler load_arg"),
    Uses("megatron.training.checkpointing:checkpoint_exists", "checkpoints_path"),
    Uses("megatron.training.checkpointing:get_load_checkpoint_path_by_args", "args load_arg"),
    Uses("megatron.core.dist_checkpointing:check_is_distributed_checkpoint", "checkpoint_dir"),
    Uses("megatron.core.dist_checkpointing.core:CheckpointingException"),
    Uses("megatron.training.theoretical_memory_usage:compute_weight_and_optimizer_memory", "args"),
    Uses("megatron.core.transformer.spec_utils:import_module", "module_path"),
    Uses("megatron.core.num_microbatches_calculator:init_num_microbatches_calculator"),
    Uses("megatron.core.num_microbatches_calculator:destroy_num_microbatches_calculator"),
    Uses("megatron.core.num_microbatches_calculator:get_num_microbatches"),
    Uses("megatron.core.num_microbatches_calculator:get_current_global_batch_size"),
    Uses("megatron.core.num_microbatches_calculator:update_num_microbatches", "consumed_samples", "consistency_check"),
    Uses("megatron.core:ModelParallelConfig"),
    Uses("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE"),
    Uses("megatron.core.safe_globals:SAFE_GLOBALS"),
    Uses("megatron.core.rerun_state_machine:get_rerun_state_machine"),
    Uses("megatron.core.utils:StragglerDetector"),
    Uses("megatron.core.enums:ModelType.encoder_or_decoder"),
    Uses("megatron.core.tensor_parallel:layers"),
    Uses("megatron.core.tensor_parallel.layers:_grad_accum_fusion_available"),
    Uses(
        "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs:get_gpt_heterogeneous_layer_spec",
        "config use_te",
    ),
)

# Its train_rl.py; mcore/megatron_lm/rl/rl_objective.py checks the script itself.
MEGATRON_LM_RL = (
    Uses(
        "megatron.rl.rl_utils:calculate_grpo_loss",
        keywords="current_logprobs old_logprobs ref_logprobs advantages clamp_eps_lower clamp_eps_upper kl_beta "
        "entropy_weight inference_logprobs is_truncation_coef",
    ),
    Uses("megatron.rl.rl_utils:get_rl_runtime_state"),
    Uses("megatron.rl.rl_utils:RLRuntimeState.increment_sequences", "count"),
    Uses("megatron.rl.rl_utils:load_packed_data_by_index", "bin_idx packing_context logprobs_is_correction"),
    # The reader of LabelLogprobs.
    Uses("megatron.rl.rl_utils:selective_log_softmax", "logits index"),
    Uses("megatron.inference.utils:add_inference_args", "parser"),
    Uses("megatron.core.num_microbatches_calculator:get_num_microbatches"),
)

# By the rooms that rely on them; HYBRID, and the tables of layer_names, where a function says that they are there.
TABLES = {"seam": SEAM, "engine": ENGINE, "packed": PACKED, "models": MODELS, "loop": LOOP}


def has_hybrid_model() -> bool:
    """Return whether this megatron-core has HybridModel; releases before 0.18 have none."""
    return importlib.util.find_spec(_HYBRID) is not None


def check(table: Iterable[Uses]) -> None:
    """Raise MegatronCoreError if megatron-core lacks names of a table; it lists them and the supported versions."""
    found = [sentence for uses in table for sentence in find_missing(uses)]
    if found:
        raise MegatronCoreError(
            f"megatron-core {installed_version()} lacks names that this package uses: {'; '.join(found)}; {SUPPORTED}"
        )


def missing_by_room(*, megatron_lm: bool = False) -> dict[str, list[str]]:
    """Return the names that each room relies on and megatron-core (with ``megatron_lm``, Megatron-LM too) lacks."""
    tables = dict(TABLES)
    if has_hybrid_model():
        tables["hybrid"] = HYBRID
    if layer_names.has_delta_net():
        tables["Gated DeltaNet"] = layer_names.DELTA_NET
    if layer_names.has_sparse_attention():
        tables["sparse attention"] = layer_names.SPARSE_ATTENTION
    tables |= {"multi-token prediction": multi_token_names.TABLE} if multi_token_names.are_there() else {}
    if import_upstream("megatron.core.extensions.transformer_engine").HAVE_TE:
        tables["TransformerEngine"] = TRANSFORMER_ENGINE
    if megatron_lm:
        tables["Megatron-LM"] = MEGATRON_LM
        with suppress(ImportError):  # train_rl.py came with core_v0.19, and imports packages that others do not need
            import_upstream("megatron.rl.rl_utils")
            tables["train_rl.py"] = MEGATRON_LM_RL
    return {room: [one for uses in table for one in find_missing(uses)] for room, table in tables.items()}


def check_version() -> None:
    """Reject a version older than :data:`OLDEST` with MegatronCoreError, and warn about an untested one."""
    version = installed_version()
    release = _release(version)
    if release < _release(OLDEST):
        raise MegatronCoreError(f"megatron-core {version} is too old; {SUPPORTED}")
    if not is_tested(version):
        warnings.warn(
            f"megatron-core {version} has the interface that this package needs, but its tests have not seen it; "
            f"{SUPPORTED}, `mcore-prefix-tree verify RECIPE` compares folded with unfolded on this one",
            stacklevel=2,
        )


def is_tested(version: str) -> bool:
    """Return whether ``scripts/versions`` tests the release series of a version."""
    return any(_release(version)[:2] == _release(tested)[:2] for tested in (*RELEASES, MAIN))


def installed_version() -> str:
    """Return the version of the ``megatron.core`` that is imported, which need not be the one that pip lists."""
    return str(import_upstream("megatron.core").__version__)


def installed_folder() -> Path:
    """Return the folder of that ``megatron.core``."""
    return Path(import_upstream("megatron.core").__file__).parent


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without ``dev`` or the name of a commit."""
    return tuple(int(number) for number in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]
