"""Specs whose layers follow trees, from any GPT layer or block spec; and ready specs for Megatron-LM's ``--spec``.

``--spec mcore_prefix_tree.mcore.seam.layer_specs gpt_layer_local`` (Megatron-LM reads the name from this module) takes
one of ``gpt_layer_local``, ``gpt_layer_local_qk_layernorm``, ``gpt_layer_te``, ``gpt_layer_te_qk_layernorm``. None of
them has multi-latent attention: omit ``--spec`` for that.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, HAS_HYBRID_MODEL, NEEDS_DEPTHS
from mcore_prefix_tree.mcore.seam.core_attention import tree_class
from mcore_prefix_tree.mcore.seam.tree_layers import TreeLayerMixin, TreeStackMixin, check_layer

if HAS_HYBRID_MODEL:
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules

Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)


def with_prefix_tree(spec: Spec) -> Spec:
    """Return a spec whose layers follow the tree of a micro-batch that carries one, and are unchanged without.

    They change when they are built, as :func:`follow_trees` changes those of a built model.

    Args:
        spec: a ``ModuleSpec`` of a transformer layer or block, or ``TransformerBlockSubmodules``; local,
            TransformerEngine, MoE, multi-latent attention or heterogeneous; or the ``ModuleSpec`` of a
            ``HybridStack``, ``hybrid_stack_spec``; or the ``mtp_block_spec`` of a model, which then goes through
            :func:`with_multi_token`. It is not modified.

    Returns:
        A spec of the same kind. Models built from it have the state-dict keys of models built from ``spec``; building
        raises what :func:`follow_trees` raises.

    Raises:
        NotImplementedError: a layer is neither a ``TransformerLayer`` nor a ``MambaLayer``; names its class.
        TypeError: ``spec`` is not such a spec.
    """
    if isinstance(spec, TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules):
        return dataclasses.replace(spec, layer_specs=[_layer(layer) for layer in spec.layer_specs])
    if not isinstance(spec, ModuleSpec):
        raise TypeError(f"with_prefix_tree takes a ModuleSpec or TransformerBlockSubmodules, not {type(spec).__name__}")
    if isinstance(spec.submodules, TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules):
        return dataclasses.replace(spec, submodules=with_prefix_tree(spec.submodules))
    if is_hybrid_stack(spec):
        return dataclasses.replace(spec, module=tree_class(TreeStackMixin, get_module(spec)))
    return _layer(spec)


def is_hybrid_stack(spec: Any) -> bool:
    """Return whether a spec is that of a ``HybridStack``."""
    return HAS_HYBRID_MODEL and isinstance(getattr(spec, "submodules", None), HybridStackSubmodules)


def _layer(spec: ModuleSpec) -> ModuleSpec:
    module = get_module(spec)
    check_layer(module)
    if issubclass(module, MultiTokenPredictionLayer) and not HAS_DEPTHS:
        raise NotImplementedError(f"multi-token prediction on a tree needs {NEEDS_DEPTHS}")
    return dataclasses.replace(spec, module=tree_class(TreeLayerMixin, module))


def local_layer_spec(**options: Any) -> ModuleSpec:
    """Return ``get_gpt_layer_local_spec(**options)`` of megatron-core, tree-capable."""
    return with_prefix_tree(get_gpt_layer_local_spec(**options))


def te_layer_spec(**options: Any) -> ModuleSpec:
    """Return ``get_gpt_layer_with_transformer_engine_spec(**options)`` of megatron-core, tree-capable.

    Raises:
        ImportError: TransformerEngine is not installed.
    """
    if not _have_te():
        raise ImportError(_TE_MISSING)
    return with_prefix_tree(get_gpt_layer_with_transformer_engine_spec(**options))


_TE_MISSING = (
    "this layer spec needs TransformerEngine, which is not installed; pip install transformer-engine[pytorch], or use "
    "the local specs (gpt_layer_local)"
)


def _have_te() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


class TransformerEngineMissing(BaseTransformerLayer):  # type: ignore[misc]
    """Stand-in for the layers of a missing TransformerEngine, which reports that when a model is built."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(_TE_MISSING)


def _te_spec(**options: Any) -> ModuleSpec:
    # --spec reads a name of this module: it has to exist without TransformerEngine too, for its error to be readable.
    return te_layer_spec(**options) if _have_te() else ModuleSpec(module=TransformerEngineMissing)


gpt_layer_local = local_layer_spec()
gpt_layer_local_qk_layernorm = local_layer_spec(qk_layernorm=True)
gpt_layer_te = _te_spec()
gpt_layer_te_qk_layernorm = _te_spec(qk_layernorm=True)


def stock_block_spec(
    config: Any, *, use_transformer_engine: bool, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return upstream's decoder block of a model, for megatron-core's local or TransformerEngine's layers.

    Raises:
        NotImplementedError: upstream has no local layers with the model's ``experimental_attention_variant``.
    """
    if config.experimental_attention_variant is not None:
        if not use_transformer_engine:
            raise NotImplementedError(
                f"experimental_attention_variant={config.experimental_attention_variant!r}: Megatron-Core has no local "
                "layers of it; set transformer_impl=transformer_engine"
            )
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if not use_transformer_engine and config.normalization == "RMSNorm":
        # Where Apex can be imported upstream takes its final norm, which is LayerNorm and nothing else.
        block = dataclasses.replace(block, layer_norm=WrappedTorchNorm)
    return block
