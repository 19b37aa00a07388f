"""Layers that follow trees: each stock module, once built, gets a subclass of its class, as in torch's ``fully_shard``.

Parameters, state-dict keys and the names of classes stay, and without a tree a layer computes what it did. A layer of a
:func:`with_prefix_tree` spec changes itself when it is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_HYBRID_MODEL, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.core_attention import (
    TreeCoreAttentionMixin,
    TreeFlatAttentionMixin,
    TreeSelfAttentionMixin,
    change_class,
)
from mcore_prefix_tree.mcore.seam.experts import TreeExpertLayerMixin, TreeExpertsMixin, TreeRouterMixin
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER, check_pattern
from mcore_prefix_tree.mcore.seam.latent_attention import TreeAbsorbedAttentionMixin, TreeLatentAttentionMixin
from mcore_prefix_tree.mcore.seam.multi_token_layer import TreeMultiTokenLayerMixin
from mcore_prefix_tree.mcore.seam.packed_seq_params import CORE_KNOWS_TREES
from mcore_prefix_tree.mcore.seam.validation import check_config, graph_modules
from mcore_prefix_tree.plan.model_shape import DELTA_NETS
from mcore_prefix_tree.utils.randomness import registrations

# Classes that mix the tokens of a layer, and what makes them follow a tree.
_MIXERS: dict[type, Any] = {SelfAttention: TreeSelfAttentionMixin, MLASelfAttention: TreeLatentAttentionMixin}
_CORES: dict[type, Any] = {torch.nn.Module: TreeCoreAttentionMixin}
# Classes of Megatron-Bridge and slime with methods of theirs that compute each token by itself.
_BY_TOKEN = {f"{name}SelfAttention" for name in ("Gemma3", "Gemma4", "Gemma4Dense", "MiniMaxM2", "OLMoE", "Qwen3VL")}
# Functions that reject a machine without the packages of a hybrid pattern's layers, by letter.
_PACKAGES: dict[str, Any] = {}
if HAS_DELTA_NET:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from mcore_prefix_tree.mcore.seam import delta_net

    _MIXERS[GatedDeltaNet] = delta_net.TreeDeltaNetMixin
    _PACKAGES["G"] = delta_net.check_packages
if HAS_SPARSE_ATTENTION:
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    from mcore_prefix_tree.mcore.seam.sparse_attention import TreeSparseAttentionMixin

    _MIXERS[AbsorbedMLASelfAttention] = TreeAbsorbedAttentionMixin
    _CORES = {DSAttention: TreeSparseAttentionMixin} | _CORES
if HAS_HYBRID_MODEL:
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.ssm.mamba_mixer import MambaMixer

    from mcore_prefix_tree.mcore.seam import mamba

    _MIXERS[MambaMixer] = mamba.TreeMambaMixin
    _PACKAGES["M"] = mamba.check_packages
# Attribute of a model that was found to follow trees.
_FOLLOWS = "_prefix_tree_follows"
_LAYERS: tuple[type, ...] = (TransformerLayer, MambaLayer) if HAS_HYBRID_MODEL else (TransformerLayer,)


class TreeLayerMixin:
    """A layer that follows trees as soon as it is built."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Reject settings, build the base class, and let it follow trees; see :func:`follow_trees`."""
        check_config(config)
        if config.experimental_attention_variant in DELTA_NETS:
            _PACKAGES["G"]()
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        stock: Any = self
        follow_trees(stock)


class TreeStackMixin(TreeLayerMixin):
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
        pattern = "".join(layer_type_list or ())
        check_pattern(pattern)
        for letter, check in _PACKAGES.items():
            if letter in pattern:
                check()
        super().__init__(config, submodules, pre_process, layer_type_list, *args, **kwargs)


def follow_trees(model: torch.nn.Module) -> None:
    """Let the layers of a built model, or of a part of one, follow trees. A second call changes nothing.

    Raises:
        ImportError: a layer lacks packages, or functions of them, that a tree needs.
        NotImplementedError: a setting or a layer is not supported; names it. See :func:`check_config`. Or
            Megatron-Bridge's own layers fail with a setting, or get wrong gradients.
    """
    config: Any = model.config
    check_config(config)
    _check_own_layers(config)
    for layer in getattr(getattr(model, "decoder", None), "layers", ()):
        check_layer(type(layer))
    for layer in list(model.modules()):
        if isinstance(layer, _LAYERS):
            _follow_in_layer(layer)
        elif isinstance(layer, MultiTokenPredictionLayer):
            change_class(layer, TreeMultiTokenLayerMixin)
    for name, module in model.named_modules():
        if isinstance(module, Attention) and not isinstance(module, tuple(_MIXERS.values())):
            raise NotImplementedError(f"{name} is a {type(module).__name__}, which does not follow a tree")


def check_layer(kind: Any) -> None:
    """Raise NotImplementedError for a class of layers that does not follow trees."""
    if not (isinstance(kind, type) and issubclass(kind, (*_LAYERS, MultiTokenPredictionLayer))):
        newer = "" if HAS_HYBRID_MODEL else f"; {NEEDS_NEWER}"
        raise NotImplementedError(
            f"prefix-tree training does not support layers of class {getattr(kind, '__name__', kind)}: use one of "
            f"{', '.join(known.__name__ for known in _LAYERS)}{newer}"
        )


def check_follows(model: torch.nn.Module) -> None:
    """Raise NotImplementedError if a module does not follow trees; those of a patched Megatron-Core do by themselves.

    It looks again only if torch has registered a module since the last call, for example in place of another.
    """
    count = registrations()
    if CORE_KNOWS_TREES or vars(model).get(_FOLLOWS) == count:
        return
    stock = next((one for module in model.modules() for one in _stock_in(module)), None)
    if stock is not None:
        raise NotImplementedError(
            f"the model's {type(stock).__name__} does not follow a tree; call follow_trees(model), or build it from "
            "with_prefix_tree(spec)"
        )
    vars(model)[_FOLLOWS] = count


def _stock_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the module, or its core attention, if a tree needs another class of it."""
    classes: list[tuple[Any, Any, Any]] = [(module, tuple(_MIXERS), tuple(_MIXERS.values()))]
    classes.append((module, TopKRouter, TreeRouterMixin))
    if isinstance(module, Attention):
        classes.append((module.core_attention, torch.nn.Module, tuple(_CORES.values())))
    yield from (one for one, kind, tree in classes if isinstance(one, kind) and not isinstance(one, tree))


def _follow_in_layer(layer: Any) -> None:
    if HAS_HYBRID_MODEL and isinstance(layer, MambaLayer):
        _follow_mixer(layer, layer.mixer, "the mixer of a Mamba layer")
        return
    _check_replayed(layer)
    if not isinstance(layer.cross_attention, IdentityOp):
        raise NotImplementedError(
            f"prefix-tree training does not support cross-attention ({type(layer.cross_attention).__name__}), which "
            f"layer {layer.layer_number} has"
        )
    # A heterogeneous layer without attention works on each token by itself.
    linear = getattr(layer.submodules_config.self_attention, "params", {}).get("tp_comm_buffer_name") == "linear_attn"
    if not (linear or isinstance(layer.self_attention, IdentityOp)):
        _follow_mixer(layer, layer.self_attention, "self-attention")
    router = getattr(layer.mlp, "router", None)
    if router is None:
        return
    if not isinstance(router, TopKRouter):
        raise NotImplementedError(
            f"prefix-tree training needs a TopKRouter in layer {layer.layer_number}, not a {type(router).__name__}"
        )
    for module, mixin in ((layer, TreeExpertLayerMixin), (layer.mlp, TreeExpertsMixin), (router, TreeRouterMixin)):
        change_class(module, mixin)


def _follow_mixer(layer: Any, module: Any, place: str) -> None:
    """Let a module that mixes tokens follow trees; a built one may have got another core attention."""
    mixin = next((mixin for kind, mixin in _MIXERS.items() if isinstance(module, kind)), None)
    if mixin is None:
        known = ", ".join(kind.__name__ for kind in _MIXERS)
        raise NotImplementedError(
            f"prefix-tree training does not support {type(module).__name__} as {place}, in layer "
            f"{layer.layer_number}: use one of {known}"
        )
    _check_methods(layer, module)
    if type(module).__name__ == "Qwen3VLSelfAttention":
        mixin = TreeFlatAttentionMixin
    if change_class(module, mixin):
        module.follow_tree()
    if not isinstance(module, Attention):
        return
    if "causal" not in module.attn_mask_type.name:
        raise NotImplementedError(
            f"layer {layer.layer_number} has attn_mask_type={module.attn_mask_type.name}: a token of a tree sees the "
            "tokens before it and no others; use a causal layer spec"
        )
    core: Any = module.core_attention
    if not _is_stock(type(core).forward):
        raise NotImplementedError(
            f"prefix-tree training does not support {type(core).__name__} as core attention, in layer "
            f"{layer.layer_number}: trees would not have what its forward computes"
        )
    if change_class(core, next(mixin for kind, mixin in _CORES.items() if isinstance(core, kind))):
        core.follow_tree(module)


def _check_methods(layer: Any, module: Any) -> None:
    """Reject a class with methods that may read the order of tokens, for example to scale queries by positions."""
    kind: Any = type(module)
    if kind.__name__ in _BY_TOKEN or getattr(kind, "follows_prefix_trees", False):
        return
    for name in ("forward", "get_query_key_value_tensors"):
        if not _is_stock(getattr(kind, name, None)):
            raise NotImplementedError(
                f"layer {layer.layer_number} has a {kind.__name__} whose {name} is not Megatron-Core's; if it computes "
                "each token by itself, apart from its rotary embedding, set follows_prefix_trees = True on the class"
            )


def _check_replayed(layer: Any) -> None:
    """Reject CUDA graphs of a class with methods of its own, which a replay would not call, or not with a tree."""
    name = next((name for name in ("forward", "_forward_mlp") if not _is_stock(getattr(type(layer), name, None))), None)
    if name is not None and graph_modules(layer.config):
        raise NotImplementedError(
            f"prefix-tree training does not support cuda_graph_impl={layer.config.cuda_graph_impl!r} in layer "
            f"{layer.layer_number}, a {type(layer).__name__} whose {name} is not Megatron-Core's; set "
            "cuda_graph_impl='none'"
        )


def _is_stock(method: Any) -> bool:
    """Return whether a method is Megatron-Core's or this package's."""
    module: str = getattr(method, "__module__", "megatron.core.")
    return module.startswith(("megatron.core.", "mcore_prefix_tree."))


def names_own_layers(config: Any) -> bool:
    """Return whether a configuration is Megatron-Bridge's of Gemma 4 without experts, whose model ignores any spec."""
    return hasattr(config, "num_global_query_groups")


def _check_own_layers(config: Any) -> None:
    """Reject settings with which layers of Gemma 4 without experts fail, or get wrong gradients, unfolded too."""
    if not names_own_layers(config):
        return
    embeddings, shared = config.per_layer_embed_dim, config.num_kv_shared_layers
    found = None
    if embeddings and config.sequence_parallel:
        found = (
            f"sequence_parallel=True with per_layer_embed_dim={embeddings}: Megatron-Bridge does not add up gradients "
            "of per_layer_input_gate and per_layer_projection over tensor-parallel ranks; set sequence_parallel=False"
        )
    elif (embeddings or shared) and config.recompute_granularity == "full":
        found = (
            f"recompute_granularity='full' with per_layer_embed_dim={embeddings} and num_kv_shared_layers={shared}: "
            "Megatron-Bridge cannot recompute layers with embeddings of their own, nor layers that take the keys which "
            "another has kept; set recompute_granularity='selective' or None"
        )
    elif config.tensor_model_parallel_size > 1 and not config.qk_layernorm:
        found = (
            f"qk_layernorm=False with tensor_model_parallel_size={config.tensor_model_parallel_size}: Megatron-Core "
            "would not add up the gradients of the norms that these layers have anyway; set qk_layernorm=True"
        )
    if found is not None:
        raise NotImplementedError(f"prefix-tree training does not support {found}")
