"""Layers of hybrid models, and those with which Megatron-Bridge's models compute what transformers' do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcore_prefix_tree.cpu.specs import exchanged
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.models.config_fields import check_transformer_engine
from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_HYBRID_MODEL, NEEDS_NEWER, check_pattern
from mcore_prefix_tree.plan.model_shape import PIPE
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig, RecipeError

# Epsilon of the norms in latent attention: transformers' models leave it at their norms' default.
_LATENT_EPSILON = 1e-6


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
    compat.check(compat.TRANSFORMER_ENGINE)
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
