"""Fields of a ``TransformerConfig``, and layers, that a recipe sets for every model, whoever decides its sizes."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import json
from collections.abc import Callable, Container
from functools import cache
from typing import Any, get_type_hints

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mcore_prefix_tree.cpu.specs import cpu_spec, exchanged, interleaving
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER, check_pattern
from mcore_prefix_tree.mcore.seam.layer_specs import stock_block_spec, with_prefix_tree
from mcore_prefix_tree.plan.model_shape import PIPE
from mcore_prefix_tree.settings import Dtype, ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.utils.inputs import MOST

DTYPES: dict[Dtype, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Keys of a recipe's model that megatron-core's configurations and Megatron-LM's arguments have under the same names.
SAME_NAMES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("normalization", "add_bias_linear", "qk_layernorm"),
)
# Epsilon of the norms in latent attention: transformers' models leave it at their norms' default.
_LATENT_EPSILON = 1e-6


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
    hints = get_type_hints(kind) | {"q_lora_rank": int | None}  # Megatron's layers take None, its hint does not
    return {name: _typed(name, value, hints[name]) for name, value in model.transformer.items()}


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


def check_not_decided(model: ModelConfig, fixed: Container[str]) -> None:
    """Reject a key of ``model.transformer`` among the fields that a run sets itself."""
    taken = sorted(name for name in model.transformer if name in fixed)
    if taken:
        raise RecipeError(f"model.transformer.{taken[0]}: other keys of the recipe, or folding, decide this; remove it")


def check_experts(count: int | None, parallel: ParallelConfig) -> None:
    """Reject a layout in which ranks cannot share a layer's ``count`` experts, None without any."""
    ranks = parallel.expert_model_parallel_size
    if ranks == 1 or count is None:  # which megatron-core rejects
        return
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


def check_hybrid(model: ModelConfig, parallel: ParallelConfig, *, on_gpu: bool) -> None:
    """Reject a pattern that cannot be trained in a parallel layout: RecipeError."""
    pattern = model.hybrid_layer_pattern
    assert pattern is not None, "asked for"
    if not HAS_HYBRID_MODEL:
        raise RecipeError(f"model.hybrid_layer_pattern: {NEEDS_NEWER}")
    try:
        check_pattern(pattern)
    except NotImplementedError as error:
        raise RecipeError(f"model.hybrid_layer_pattern: {error}") from None
    if on_gpu and model.transformer_impl == "local":
        raise RecipeError("model.hybrid_layer_pattern needs model.transformer_impl=transformer_engine on a GPU")
    groups, ranks = model.transformer.get("mamba_num_groups", 8), parallel.tensor_model_parallel_size
    if "M" in pattern and groups % ranks:
        raise RecipeError(
            f"parallel.tensor_model_parallel_size={ranks} does not divide the mamba_num_groups={groups} of Mamba-2's "
            "layers, which ranks share; choose a size that divides it"
        )
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    has, needs = pattern.count(PIPE) + 1, stages * (chunks or 1)
    cut_by_megatron = has == 1 and chunks is None and model.num_layers % stages == 0
    if has != needs and not cut_by_megatron:
        raise RecipeError(
            f"model.hybrid_layer_pattern={pattern!r} has {has} pipeline stages, but parallel asks for {needs}; put | "
            "between the layers of two stages"
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


def has_pattern(provider: Any) -> bool:
    """Return whether Megatron-Bridge's provider builds a ``HybridModel``."""
    return getattr(provider, "hybrid_layer_pattern", None) is not None


def stack_of_folder(model: ModelConfig, parallel: ParallelConfig) -> Any:
    """Return the function that gives a folder's stack; raise RecipeError for virtual pipeline stages."""
    if parallel.virtual_pipeline_model_parallel_size is not None:
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge builds hybrid models without virtual pipeline stages; remove "
            "parallel.virtual_pipeline_model_parallel_size"
        )
    return engine_stack if model.transformer_impl == "transformer_engine" else local_stack


def engine_stack(config: Any) -> Any:
    """Return the spec of a hybrid stack of TransformerEngine's layers."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    check_transformer_engine()
    return hybrid_stack_spec


def local_stack(config: Any) -> Any:
    """Return the spec of a hybrid stack of local layers."""
    from mcore_prefix_tree.cpu.hybrid import hybrid_stack

    return hybrid_stack


def engine_layers(given: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the layer spec ``given``, or made by it; the norms behind its linear layers have the model's epsilon."""
    from megatron.bridge.models.common.te_layers import TERowParallelLinearLayerNorm as Given

    if not isinstance(given, ModuleSpec | TransformerBlockSubmodules):
        takes_stage = "vp_stage" in inspect.signature(given).parameters
        given = given(config, vp_stage=vp_stage) if takes_stage else given(config)
    return exchanged(given, {Given: _with_epsilon(Given)})


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
    return exchanged(layers(config, vp_stage=vp_stage), {one: _with_latent_epsilon(one) for one in stock})


@cache
def _with_latent_epsilon(base: type) -> type:
    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        own = copy.copy(config)  # only latent norms are inside this layer
        own.layernorm_epsilon = _LATENT_EPSILON
        base.__init__(self, own, *args, **options)  # type: ignore[misc]

    names = {"__init__": __init__, "__doc__": base.__doc__, "__module__": __name__}
    return type(base.__name__, (base,), names)
