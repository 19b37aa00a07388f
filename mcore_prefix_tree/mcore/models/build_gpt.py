"""A recipe's model, built from megatron-core's own pieces."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.mcore.models.bridge import make_provider, provided
from mcore_prefix_tree.mcore.models.config_fields import (
    SAME_NAMES,
    check_experts,
    check_hybrid,
    check_latent_layers,
    check_not_decided,
    check_transformer_engine,
    defaults_of_run,
    engine_stack,
    local_layers,
    local_stack,
    settings_of_run,
    typed_settings,
)
from mcore_prefix_tree.mcore.models.lora import with_lora
from mcore_prefix_tree.mcore.seam.layer_specs import stock_block_spec, with_prefix_tree
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head, with_vocab_size
from mcore_prefix_tree.mcore.seam.scalar_output_layer import with_scalar_head
from mcore_prefix_tree.mcore.seam.validation import check_model
from mcore_prefix_tree.plan import LatentAttention, ModelWork
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.utils.memory import available_bytes


def transformer_config(model: ModelConfig, parallel: ParallelConfig, *, on_gpu: bool) -> TransformerConfig:
    """Return the ``TransformerConfig`` of a model; with ``multi_latent_attention`` in it, an ``MLATransformerConfig``.

    For a Hugging Face folder it is Megatron-Bridge's provider, which builds the model too. Raises RecipeError for a key
    or value of ``model.transformer`` that the class lacks or the run sets, or if megatron-core refuses the combination.
    """
    if model.hf is not None:
        return make_provider(model, parallel, on_gpu=on_gpu)
    latent = LatentAttention.from_settings(model.transformer)
    kind = TransformerConfig if latent is None else MLATransformerConfig
    settings = typed_settings(model, kind)
    if latent is not None:
        check_latent_layers(model, parallel, on_gpu=on_gpu)
    fixed = settings_of_run(model, parallel, on_gpu=on_gpu) | {
        **{name: getattr(model, name) for name in SAME_NAMES},
        "gated_linear_unit": model.swiglu,
        "activation_func": torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
    }
    if latent is not None:
        fixed |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    check_not_decided(model, fixed)
    check_experts(settings.get("num_moe_experts"), parallel)
    if model.hybrid_layer_pattern is not None:
        check_hybrid(model, parallel, on_gpu=on_gpu)
        fixed["is_hybrid_model"] = True
    try:
        config = kind(**(fixed | defaults_of_run(parallel) | settings))
    except Exception as error:  # a division by zero, too
        raise RecipeError(f"megatron-core refuses this model or parallel layout: {error}") from error
    # No field of Megatron's, which gives it to the model alone. Which rows of routes are read depends on it.
    config.hybrid_layer_pattern = model.hybrid_layer_pattern
    if model.yarn is not None:
        # No fields: GPTModel looks for attributes, as Megatron-LM's arguments leave them.
        for name, value in vars(model.yarn).items():
            setattr(config, f"yarn_{name}", value)
    return config


def build_chunks(
    model: ModelConfig,
    config: TransformerConfig,
    *,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    device: torch.device,
    scalar_head: bool = False,
    fused_head: bool = True,
    groups: ProcessGroupCollection | None = None,
) -> list[torch.nn.Module]:
    """Return this rank's model chunks, tree-capable, without gradient buffers: one, or one per virtual pipeline stage.

    Each is a ``GPTModel`` or ``HybridModel``, inside ``Float16Module`` in half precision.

    ``groups`` are those of the model's ranks, if they are not those of ``parallel_state``; with one pipeline stage in
    ``config`` a rank has all layers. Raises as :func:`check_model`, or RecipeError if TransformerEngine or memory is
    missing, or megatron-core refuses sizes of a layer.
    """
    _check_fits(model, config, device, scalar_head=scalar_head)
    vpp = config.virtual_pipeline_model_parallel_size
    has_stages = config.pipeline_model_parallel_size > 1
    chunks: list[torch.nn.Module] = []
    for vp_stage in [None] if vpp is None else range(vpp):
        place = {"ignore_virtual": vpp is None, "vp_stage": vp_stage}
        ends = {
            "pre_process": not has_stages or parallel_state.is_pipeline_first_stage(**place),
            "post_process": not has_stages or parallel_state.is_pipeline_last_stage(**place),
            "vp_stage": vp_stage,
        }
        try:
            # Megatron-Bridge's depths of multi-token prediction are TransformerEngine's.
            if model.hf is not None and not (config.mtp_num_layers and model.transformer_impl == "local"):
                chunk = provided(config, scalar_head=scalar_head, **ends)
            else:
                kind, own = _model_class(model, config, vp_stage)
                chunk = kind(
                    config,
                    vocab_size=padded_vocab_size or vocab_size,
                    max_sequence_length=model.max_position_embeddings,
                    share_embeddings_and_output_weights=not (model.untie_embeddings_and_output_weights or scalar_head),
                    position_embedding_type=model.position_embedding_type,
                    rotary_base=model.rotary_base,
                    rotary_percent=model.rotary_percent,
                    pg_collection=groups,
                    **own,
                    **ends,
                )
        except AssertionError as error:  # upstream adds the modules that it was building
            reason = str(error).partition(" when instantiating")[0]
            raise RecipeError(f"megatron-core refuses this model: {reason}") from error
        check_model(chunk)
        if scalar_head:
            with_scalar_head(chunk)
        else:
            with_vocab_size(chunk, vocab_size)
            with_multi_token(chunk)
            if fused_head:
                with_edge_head(chunk)
        if model.lora is not None:
            with_lora(chunk, model.lora)
        # Torch's norms start in the default dtype, not in params_dtype.
        chunk = chunk.to(device=device, dtype=config.params_dtype)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
        for module in chunk.modules():
            # The biases of experts stay in fp32, as in Megatron's training around ``Float16Module``.
            keep: Any = getattr(module, "_maintain_float32_expert_bias", lambda: None)
            keep()
    return chunks


def _weights(model: ModelConfig, *, scalar_head: bool) -> int:
    """Return how many weights a model has at least: experts that a token does not pass through are not counted."""
    work = ModelWork.from_model(model, vocab_size=1)
    tables = 1 if not model.untie_embeddings_and_output_weights or scalar_head else 2
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    # A multiplication and an addition for each weight and token.
    return int(work.token) // 2 + (tables * (model.vocab_size or 1) + positions) * model.hidden_size


def describe_size(model: ModelConfig, *, scalar_head: bool) -> str:
    """Return the size of a model, for messages."""
    return (
        f"at least {_weights(model, scalar_head=scalar_head):,} weights (model.num_layers={model.num_layers}, "
        f"hidden_size={model.hidden_size}, vocab_size={model.vocab_size}); lower these or batch.max_tokens, or split "
        "the model with parallel"
    )


def _check_fits(model: ModelConfig, config: TransformerConfig, device: torch.device, *, scalar_head: bool) -> None:
    """Reject weights that exceed the free memory by themselves: a host that overcommits would kill the process."""
    parts = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    needed = _weights(model, scalar_head=scalar_head) * config.params_dtype.itemsize // parts
    free = available_bytes(device)
    if needed > free:
        raise RecipeError(
            f"the weights of this rank take {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; the model "
            f"has {describe_size(model, scalar_head=scalar_head)}"
        )


def _model_class(model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> tuple[Any, dict[str, Any]]:
    """Return the class of a model's stages, and its arguments that others lack."""
    if model.hybrid_layer_pattern is not None:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        stack = local_stack(config) if config.use_cpu_initialization else engine_stack(config)
        return HybridModel, {
            "hybrid_stack_spec": with_prefix_tree(stack),
            "hybrid_layer_pattern": model.hybrid_layer_pattern,
        }
    use_te = model.transformer_impl != "local"
    if use_te:
        check_transformer_engine()
        block = with_prefix_tree(stock_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage))
    elif model.hf is not None:
        block = config.transformer_layer_spec(config, vp_stage=vp_stage)
    else:
        block = local_layers(config, vp_stage)
    depths = None
    if config.mtp_num_layers:
        depths = get_gpt_mtp_block_spec(config, block, use_transformer_engine=use_te, vp_stage=vp_stage)
    if depths is not None and config.use_cpu_initialization and not use_te:
        depths = cpu_spec(depths, config, vp_stage)
    return GPTModel, {
        "transformer_layer_spec": block,
        "mtp_block_spec": depths,
        "rope_scaling": model.rope_scaling,
        "rope_scaling_factor": model.rope_scaling_factor,
    }
