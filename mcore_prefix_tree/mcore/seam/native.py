"""Functions that a Megatron-Core with the source patches of ``patches/megatron-lm`` calls; nothing else does.

There, stock layer specs follow a tree by themselves, in models whose configuration says
``attention_backend=AttnBackend.tree``. The patched files import this module when they meet that setting or a folded
micro-batch, and not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcore_prefix_tree.mcore.seam.attention import TreeCoreAttentionMixin, attend, sinks_of, window_of
from mcore_prefix_tree.mcore.seam.latent_attention import TreeLatentAttentionMixin
from mcore_prefix_tree.mcore.seam.layer_specs import with_prefix_tree
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams, tree_params_of
from mcore_prefix_tree.mcore.seam.validation import check_config, check_model


def check_language_model(model: Any) -> None:
    """Refuse ``AttnBackend.tree`` for models that folding cannot do exactly; called before anything is built.

    Raises:
        NotImplementedError: names the setting, or the class of a model that is not a ``GPTModel``.
    """
    from megatron.core.models.gpt import GPTModel

    if not isinstance(model, GPTModel):
        raise NotImplementedError(
            f"attention_backend=AttnBackend.tree does not support {type(model).__name__}: of Megatron-Core's models "
            "only GPTModel follows a tree; set another attention_backend"
        )
    check_config(model.config)


def check_gpt_model(model: Any) -> None:
    """Refuse ``AttnBackend.tree`` for positions and layers that folding cannot do exactly, before they are built.

    Raises:
        NotImplementedError: names the setting or the layer's module.
    """
    check_model(model)
    with_prefix_tree(model.transformer_layer_spec)
    for attention, module in _attentions(model.transformer_layer_spec):
        if issubclass(attention, MultiLatentAttention) and not issubclass(attention, TreeLatentAttentionMixin):
            raise NotImplementedError(
                f"attention_backend=AttnBackend.tree does not support {attention.__name__}, whose rotary embeddings "
                "are not patched; build the model from with_prefix_tree(spec), which needs no patch"
            )
        if not issubclass(module, _classes_that_follow_trees()):
            raise NotImplementedError(
                f"attention_backend=AttnBackend.tree does not support {module.__name__} as core_attention: the patched "
                "DotProductAttention and TEDotProductAttention follow a tree; build the model from "
                "with_prefix_tree(spec), which needs neither"
            )


def _attentions(spec: Any) -> Iterator[tuple[type, type]]:
    """Self-attention and its core of every layer of a layer or block spec that ``with_prefix_tree`` takes."""
    block = getattr(spec, "submodules", None) if isinstance(spec, ModuleSpec) else spec
    layers = block.layer_specs if isinstance(block, TransformerBlockSubmodules) else [spec]
    for layer in layers:
        submodules = getattr(layer.submodules.self_attention, "submodules", None)
        core = getattr(submodules, "core_attention", None)
        if core is not None:
            yield get_module(layer.submodules.self_attention), get_module(core)


@cache
def _classes_that_follow_trees() -> tuple[type, ...]:
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    own = (TreeCoreAttentionMixin, DotProductAttention)
    return (*own, TEDotProductAttention) if HAVE_TE else own


def dot_product_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    packed_seq_params: Any,
) -> torch.Tensor:
    """Compute Megatron-Core's own ``DotProductAttention`` for a folded micro-batch; see :func:`attend`.

    Raises:
        NotImplementedError: the layer has an attention dropout of its own.
        ValueError: the model was not built for trees, or the call does not fit one.
    """
    tree = _tree_of(module, packed_seq_params)
    if module.attention_dropout.p:
        raise NotImplementedError(
            f"prefix-tree training does not support attention_dropout={module.attention_dropout.p} of layer "
            f"{module.layer_number}: samples that share a token would share its dropout; set attention_dropout=0"
        )
    # With apply_query_key_layer_scaling the module divides by its layer number here and multiplies in its softmax.
    scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1)
    return attend(
        tree,
        query,
        key,
        value,
        attention_mask,
        attention_bias,
        softmax_scale=scale,
        window=window_of(module.config, module.layer_number),
        sinks=sinks_of(module),
    )


def transformer_engine_keywords(module: Any, packed_seq_params: Any) -> dict[str, Any]:
    """Return what ``TEDotProductAttention`` adds to its call of TransformerEngine for a folded micro-batch.

    Raises:
        NotImplementedError: TransformerEngine is not patched, or its attention may add up in any order.
        ValueError: the model was not built for trees.
    """
    tree = _tree_of(module, packed_seq_params)
    if not _transformer_engine_knows_trees():
        raise NotImplementedError(
            "DotProductAttention of the installed TransformerEngine takes no tree_metadata: apply "
            "patches/transformer-engine with scripts/patches, or build the model from with_prefix_tree(spec), which "
            "needs no patch"
        )
    if not tree.deterministic_attention:
        raise NotImplementedError(
            "deterministic_attention=False does not reach the attention of a patched TransformerEngine, which is "
            "always deterministic: leave it out, or build the model from with_prefix_tree(spec)"
        )
    return {"tree_metadata": tree.tree_metadata, "tree_attention_backend": tree.attention_backend}


@cache
def _transformer_engine_knows_trees() -> bool:
    from transformer_engine.pytorch import DotProductAttention

    return "tree_metadata" in inspect.signature(DotProductAttention.forward).parameters


def _tree_of(module: Any, packed_seq_params: Any) -> TreePackedSeqParams:
    backend = module.config.attention_backend.name
    if backend != "tree":
        raise ValueError(
            f"a folded micro-batch reached a model with attention_backend={backend}, not checked for folding: "
            "set attention_backend=AttnBackend.tree (--attention-backend tree), or build the model from "
            "with_prefix_tree(spec)"
        )
    tree = tree_params_of(packed_seq_params)
    assert tree is not None, "only called for micro-batches that carry a tree"
    return tree
