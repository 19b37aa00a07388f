"""Fields of a ``TransformerConfig`` that a recipe sets for every model, whoever decides its sizes."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
from collections.abc import Container
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mcore_prefix_tree.cpu.specs import cpu_spec, interleaving
from mcore_prefix_tree.mcore.seam.layer_specs import stock_block_spec, with_prefix_tree
from mcore_prefix_tree.settings import Dtype, ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.utils.inputs import MOST

DTYPES: dict[Dtype, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def settings_of_run(model: ModelConfig, parallel: ParallelConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields of precision, layout and folding; raise RecipeError if TransformerEngine has no such layers."""
    dtype = DTYPES[model.dtype]
    if dtype is torch.float64 and model.transformer_impl == "transformer_engine":
        raise RecipeError("model.dtype=float64: TransformerEngine has no such layers; set model.transformer_impl=local")
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": False,
        "calculate_per_token_loss": True,
        **vars(parallel),  # its keys are Megatron's names
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        # Micro-batches differ in length; upstream lets stages exchange lengths with every dispatcher but allgather.
        "variable_seq_lengths": True,
        "use_cpu_initialization": not on_gpu,
        **interleaving(parallel.virtual_pipeline_model_parallel_size, on_gpu=on_gpu),
    }


def defaults_of_run(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields that ``model.transformer`` may set, if Megatron's defaults do not suit folding."""
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        # Without overlap the interleaved schedule of two stages has two messages in flight between the same ranks.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "masked_softmax_fusion": False,
    }


def typed_settings(model: ModelConfig, kind: type) -> dict[str, Any]:
    """Return ``model.transformer`` in the types of a configuration class; raise RecipeError for others."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(model.transformer) - known)
    if unknown:
        raise RecipeError(f"model.transformer.{unknown[0]}: megatron-core's {kind.__name__} has no such field")
    hints = get_type_hints(kind)
    return {name: _typed(name, value, hints[name]) for name, value in model.transformer.items()}


def check_not_decided(model: ModelConfig, fixed: Container[str]) -> None:
    """Reject a key of ``model.transformer`` among the fields that a run sets itself."""
    taken = sorted(name for name in model.transformer if name in fixed)
    if taken:
        raise RecipeError(f"model.transformer.{taken[0]}: other keys of the recipe, or folding, decide this; remove it")


def check_experts(count: int | None, parallel: ParallelConfig) -> None:
    """Reject a layout in which ranks cannot share a layer's ``count`` experts, None without any."""
    ranks = parallel.expert_model_parallel_size
    if ranks == 1:
        return
    if count is None:
        raise RecipeError(
            f"parallel.expert_model_parallel_size={ranks}, but the model has no experts to share; remove it"
        )
    if count % ranks:
        raise RecipeError(
            f"parallel.expert_model_parallel_size={ranks} ranks cannot share {count} experts evenly; change it"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise RecipeError(
            f"parallel.expert_model_parallel_size={ranks} with tensor parallelism needs sequence parallelism, or "
            "each rank would send the same tokens to the experts; set parallel.sequence_parallel=true"
        )


def check_latent_layers(model: ModelConfig, parallel: ParallelConfig, *, on_gpu: bool) -> None:
    """Reject multi-latent attention if Megatron-Core's own layers cannot compute it."""
    if on_gpu and model.transformer_impl == "local":
        raise RecipeError(
            "model.transformer.multi_latent_attention needs model.transformer_impl=transformer_engine on a GPU: "
            "megatron-core's own attention has one size for queries and values"
        )
    if parallel.tensor_model_parallel_size > 1 and (
        model.transformer_impl == "local" or model.transformer.get("mla_down_proj_fusion")
    ):
        raise RecipeError(
            "model.transformer.multi_latent_attention with parallel.tensor_model_parallel_size above 1 needs "
            "model.transformer_impl=transformer_engine, without mla_down_proj_fusion: of layers that split the down "
            "projection, megatron-core's own gradient is wrong (NVIDIA/Megatron-LM issue 1699)"
        )


def check_transformer_engine() -> None:
    """Raise RecipeError if TransformerEngine is not installed."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise RecipeError(
            "model.transformer_impl=transformer_engine, but TransformerEngine is not installed; "
            "pip install transformer-engine[pytorch] or set model.transformer_impl=local"
        )


def local_layers(config: Any, vp_stage: int | None = None) -> Any:
    """Return megatron-core's own layers of a model chunk, ``vp_stage`` within its stage, tree-capable."""
    if not config.use_cpu_initialization:
        return with_prefix_tree(stock_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage))
    # Without Apex or TransformerEngine megatron-core has no norm for sequence parallelism, say; testing has.
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    block = stock_block_spec(plain, use_transformer_engine=False, vp_stage=vp_stage)
    return with_prefix_tree(cpu_spec(block, config, vp_stage))


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return a value of ``model.transformer`` in its field's declared type; raise RecipeError for another type."""
    if isinstance(hint, enum.EnumMeta) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    text = json.dumps(value)
    try:
        # JSON, because a recipe's list may be a tuple; strict, because Megatron does not check its values.
        typed = TypeAdapter(
            hint, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)
        ).validate_json(text)
    except ValidationError as error:
        faults = "; or ".join(dict.fromkeys(fault["msg"][0].lower() + fault["msg"][1:] for fault in error.errors()))
        raise RecipeError(f"model.transformer.{name}: {faults} (given {text})") from None
    if isinstance(typed, int) and abs(typed) > MOST:
        raise RecipeError(f"model.transformer.{name}: input should be at most {MOST} (given {text})")
    return typed
