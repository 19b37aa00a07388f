"""The layers of a recipe's hybrid model."""

from __future__ import annotations

from typing import Any

from mcore_prefix_tree.mcore.models.config_fields import check_transformer_engine
from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_HYBRID_MODEL, NEEDS_NEWER, check_pattern
from mcore_prefix_tree.mcore.seam.layer_specs import with_prefix_tree
from mcore_prefix_tree.plan.model_shape import PIPE
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig, RecipeError


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
    """Return the function that gives a folder's stack; raise RecipeError for virtual pipeline stages.

    Megatron-Bridge sends configurations to other stages, and cannot send our classes.
    """
    if parallel.virtual_pipeline_model_parallel_size is not None:
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge builds hybrid models without virtual pipeline stages; remove "
            "parallel.virtual_pipeline_model_parallel_size"
        )
    return engine_stack if model.transformer_impl == "transformer_engine" else local_stack


def engine_stack(config: Any) -> Any:
    """Return the spec of a hybrid stack of TransformerEngine's layers that follow the tree."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    check_transformer_engine()
    return with_prefix_tree(hybrid_stack_spec)


def local_stack(config: Any) -> Any:
    """Return the spec of a hybrid stack of local layers that follow the tree."""
    from mcore_prefix_tree.cpu.hybrid import hybrid_stack

    return with_prefix_tree(hybrid_stack)
