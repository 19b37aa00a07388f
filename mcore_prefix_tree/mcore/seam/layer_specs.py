"""Conversion of any GPT layer or block spec to a tree-capable one; and ready specs for Megatron-LM's ``--spec``.

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
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, TransformerLayer

from mcore_prefix_tree.mcore import compat, multi_token_names
from mcore_prefix_tree.mcore.seam.core_attention import TreeCoreAttentionMixin, TreeSelfAttentionMixin, tree_class
from mcore_prefix_tree.mcore.seam.experts import TreeExpertLayerMixin, has_experts, with_tree_router
from mcore_prefix_tree.mcore.seam.hybrid_layers import (
    HAS_DELTA_NET,
    HAS_HYBRID_MODEL,
    HAS_SPARSE_ATTENTION,
    LAYERS,
    NEEDS_NEWER,
    check_pattern,
)
from mcore_prefix_tree.mcore.seam.latent_attention import TreeLatentAttentionMixin
from mcore_prefix_tree.mcore.seam.multi_token_layer import TreeMultiTokenLayerMixin

if HAS_HYBRID_MODEL:
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.ssm.mamba_mixer import MambaMixer

    from mcore_prefix_tree.mcore.seam.mamba import TreeMambaMixin

# Classes that mix the tokens of a layer, and what makes them follow a tree.
_ATTENTIONS: dict[Any, Any] = {SelfAttention: TreeSelfAttentionMixin, MLASelfAttention: TreeLatentAttentionMixin}
_CORES: dict[Any, Any] = {}
_STATES: dict[Any, Any] = {}
if HAS_DELTA_NET:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from mcore_prefix_tree.mcore.seam.delta_net import TreeDeltaNetMixin

    _STATES[GatedDeltaNet] = TreeDeltaNetMixin
if HAS_SPARSE_ATTENTION:
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    from mcore_prefix_tree.mcore.seam.sparse_attention import TreeSparseAttentionMixin

    _ATTENTIONS[AbsorbedMLASelfAttention] = TreeLatentAttentionMixin
    _CORES[DSAttention] = TreeSparseAttentionMixin
_MIXERS: dict[Any, Any] = {MambaMixer: TreeMambaMixin} if HAS_HYBRID_MODEL else {}

Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)


def with_prefix_tree(spec: Spec) -> Spec:
    """Return a spec whose layers follow the tree of a micro-batch that carries one, and is unchanged without.

    Args:
        spec: a ``ModuleSpec`` of a transformer layer or block, or ``TransformerBlockSubmodules``; local,
            TransformerEngine, MoE, multi-latent attention or heterogeneous; or the ``ModuleSpec`` of a
            ``HybridStack``, ``hybrid_stack_spec``; or the ``mtp_block_spec`` of a model, which then goes through
            :func:`with_multi_token`. It is not modified.

    Returns:
        A spec of the same kind. Models built from it have the state-dict keys of models built from ``spec``.

    Raises:
        NotImplementedError: a layer mixes tokens in ways other than self-attention, Gated DeltaNet and Mamba
            (cross-attention); names the module. A hybrid stack refuses its layers when it is built, by their letter:
            see :func:`check_pattern`.
        TypeError: ``spec`` is not such a spec.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        return dataclasses.replace(spec, layer_specs=[_layer(layer) for layer in spec.layer_specs])
    if isinstance(spec, MultiTokenPredictionBlockSubmodules):
        return dataclasses.replace(spec, layer_specs=[_multi_token_layer(layer) for layer in spec.layer_specs])
    if not isinstance(spec, ModuleSpec):
        raise TypeError(f"with_prefix_tree takes a ModuleSpec or TransformerBlockSubmodules, not {type(spec).__name__}")
    if isinstance(spec.submodules, TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules):
        return dataclasses.replace(spec, submodules=with_prefix_tree(spec.submodules))
    if is_hybrid_stack(spec):
        module = tree_class(TreeStackMixin, get_module(spec))
        return dataclasses.replace(spec, module=module, submodules=_hybrid_layers(spec.submodules))
    return _layer(spec)


def is_hybrid_stack(spec: Any) -> bool:
    """Return whether a spec is that of a ``HybridStack``."""
    return HAS_HYBRID_MODEL and isinstance(getattr(spec, "submodules", None), HybridStackSubmodules)


def _hybrid_layers(submodules: Any) -> Any:
    """Return ``HybridStackSubmodules`` whose layers follow the tree, except those that the stack refuses to build."""
    found = {
        layer.submodule: getattr(submodules, layer.submodule)
        for layer in LAYERS.values()
        if layer.refused is None and hasattr(submodules, layer.submodule)
    }
    layers: dict[str, Any] = {name: _layer(spec) for name, spec in found.items() if get_module(spec) is not IdentityOp}
    depths = getattr(submodules, "mtp_block_spec", None)
    if depths is not None and multi_token_names.are_there():
        layers["mtp_block_spec"] = with_prefix_tree(depths)
    return dataclasses.replace(submodules, **layers)


class TreeStackMixin:
    """A stack of hybrid layers that refuses, before it builds any, those that cannot follow a tree."""

    def __init__(
        self,
        config: Any,
        submodules: Any,
        pre_process: bool = True,
        layer_type_list: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialise the base class; raise NotImplementedError with the letter of a layer that cannot follow a tree."""
        check_pattern("".join(layer_type_list or ()))
        super().__init__(config, submodules, pre_process, layer_type_list, *args, **kwargs)  # type: ignore[call-arg]
        check_attention(self)

    def _fuse_mla_down_proj(self, submodules: Any) -> Any:
        # Upstream names the fused attention here, and ignores the spec's.
        return _hybrid_layers(super()._fuse_mla_down_proj(submodules))  # type: ignore[misc]


def check_attention(model: Any) -> None:
    """Reject a model, or a part of one, with an attention that does not follow a tree: NotImplementedError names it."""
    for name, module in model.named_modules():
        if not isinstance(module, (Attention, *_STATES, *_MIXERS)):
            continue
        if not isinstance(module, (*_ATTENTIONS.values(), *_STATES.values(), *_MIXERS.values())):
            raise NotImplementedError(
                f"{name} is a {type(module).__name__}, which does not follow a tree; build the model from "
                "with_prefix_tree(spec)"
            )
        if not isinstance(module, Attention):
            continue
        core = getattr(module, "core_attention", None)
        if not isinstance(core, (TreeCoreAttentionMixin, *_CORES.values())):
            raise NotImplementedError(
                f"{name}.core_attention is a {type(core).__name__} that does not follow a tree; Megatron-Bridge puts "
                "it there under attention_backend=local: set another attention_backend"
            )
        if "causal" not in module.attn_mask_type.name:
            raise NotImplementedError(
                f"{name} has attn_mask_type={module.attn_mask_type.name}: a token of a tree sees the tokens before it "
                "and no others; use a causal layer spec"
            )


def _layer(spec: ModuleSpec) -> ModuleSpec:
    module = get_module(spec)
    if HAS_HYBRID_MODEL and isinstance(module, type) and issubclass(module, MambaLayer):
        return dataclasses.replace(
            spec, submodules=dataclasses.replace(spec.submodules, mixer=_mixer(spec.submodules.mixer))
        )
    if not (isinstance(module, type) and issubclass(module, TransformerLayer)):
        newer = "" if HAS_HYBRID_MODEL else f"; {NEEDS_NEWER}"
        raise NotImplementedError(
            f"prefix-tree training does not support layers of class {_name(module)}: only self-attention knows the "
            f"tree{newer}"
        )
    cross = spec.submodules.cross_attention
    if get_module(cross) is not IdentityOp:
        raise NotImplementedError(f"prefix-tree training does not support cross-attention ({_name(get_module(cross))})")
    self_attention = spec.submodules.self_attention
    submodules = dataclasses.replace(spec.submodules, self_attention=_self_attention(self_attention))
    if has_experts(submodules.mlp):
        module = tree_class(TreeExpertLayerMixin, module)
        submodules = dataclasses.replace(submodules, mlp=with_tree_router(submodules.mlp))
    return dataclasses.replace(spec, module=module, submodules=submodules)


def _mixer(spec: Any) -> Any:
    module = get_module(spec)
    for known, mixin in _MIXERS.items():
        if isinstance(module, type) and issubclass(module, known):
            return dataclasses.replace(spec, module=tree_class(mixin, module))
    raise NotImplementedError(
        f"prefix-tree training does not support {_name(module)} as the mixer of a Mamba layer: use MambaMixer"
    )


def _multi_token_layer(spec: ModuleSpec) -> ModuleSpec:
    if not multi_token_names.are_there():
        raise NotImplementedError(f"multi-token prediction on a tree needs {multi_token_names.NEEDED}")
    own = spec.submodules.mtp_model_layer  # None in a HybridModel, whose depths are stacks
    submodules = dataclasses.replace(spec.submodules, mtp_model_layer=None if own is None else _layer(own))
    return dataclasses.replace(
        spec, module=tree_class(TreeMultiTokenLayerMixin, get_module(spec)), submodules=submodules
    )


def _self_attention(spec: Any) -> Any:
    module = get_module(spec)
    for known, mixin in (_ATTENTIONS | _STATES).items():
        if isinstance(module, type) and issubclass(module, known):
            submodules = spec.submodules
            if known in _ATTENTIONS:
                core_attention = _core_attention(submodules.core_attention)
                submodules = dataclasses.replace(submodules, core_attention=core_attention)
            return dataclasses.replace(spec, module=tree_class(mixin, module), submodules=submodules)
    if module is IdentityOp or getattr(spec, "params", {}).get("tp_comm_buffer_name") == "linear_attn":
        return spec  # a heterogeneous layer without attention works on each token by itself
    raise NotImplementedError(
        f"prefix-tree training does not support {_name(module)} as self-attention: use one of "
        f"{', '.join(map(_name, _ATTENTIONS | _STATES))}"
    )


def _core_attention(spec: Any) -> Any:
    module = get_module(spec)
    if not isinstance(module, type):
        raise NotImplementedError(f"prefix-tree training needs a class as core_attention, not {_name(module)}")
    mixins = [mixin for known, mixin in _CORES.items() if issubclass(module, known)]
    tree_module = tree_class(*mixins or [TreeCoreAttentionMixin], module)
    return dataclasses.replace(spec, module=tree_module) if isinstance(spec, ModuleSpec) else tree_module


def _name(module: Any) -> str:
    return str(getattr(module, "__name__", module))


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
    compat.check(compat.TRANSFORMER_ENGINE)
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


def multi_token_spec(
    config: Any, block: Any, *, use_transformer_engine: bool, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the depths of multi-token prediction of a stage with this ``block``, tree-capable; None without any."""
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, block, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage)
    return None if spec is None else with_prefix_tree(spec)
