"""Fold samples into any causal LM of Hugging Face Transformers that lets its attention be exchanged.

Importing this module registers the attention implementation ``prefix_tree`` through Transformers' own interface. The
tree is a keyword argument of the model call, which Transformers passes to each attention layer; no mask is made.

Legend: P padded tokens of a layout, V vocabulary, H and K query and key heads, D and W channels of a key and a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from mcore_prefix_tree.attention import AttentionOptions, Case, tree_attention
from mcore_prefix_tree.attention.api import AUTO, check_case, check_setting, load_backend
from mcore_prefix_tree.attention.auto import TreeShape, choose
from mcore_prefix_tree.attention.backend_options import cast_inputs, without_autocast
from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.logprob import Edges, edge_logprobs, restore
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.randomness import Draws, LayerDraws, drew, random_part
from mcore_prefix_tree.utils.upload import upload

NAME = "prefix_tree"

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MIXERS = (torch.nn.Conv1d, torch.nn.RNNBase)
# They choose frequencies by the longest position of a batch, so that a sample's angles depend on other samples.
_BATCH_ROPES = {"dynamic", "longrope"}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *,
    prefix_tree: TreeMetadata | None = None,
    prefix_tree_backend: str = AUTO,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend along each token's path, as Transformers calls an attention implementation.

    Args:
        query: ``[1, H, P, D]``.
        key: ``[1, K, P, D]``.
        value: ``[1, K, P, W]``.
        attention_mask: must be None.
        prefix_tree: metadata of the layout, from :func:`model_inputs`.
        prefix_tree_backend: key of :data:`~mcore_prefix_tree.attention.BACKENDS`, or ``"auto"``.
        scaling: factor on the scores, ``D ** -0.5`` by default.
        sliding_window: see :class:`~mcore_prefix_tree.attention.AttentionOptions`.
        s_aux: attention sinks, ``[H]``.
        dropout, softcap, is_causal: rejected unless they are off, off and true.

    Returns:
        ``[1, P, H, W]``, and None for the attention weights.

    Raises:
        ValueError: an argument is not supported, or the layer or the model draws random numbers.
    """
    where = f"attn_implementation={NAME!r}"
    if prefix_tree is None:
        raise ValueError(
            f"{where} did not receive the argument prefix_tree: call model(**model_inputs(model, layout)), or "
            "model.set_attn_implementation('sdpa') for plain batches and generation; for a trainer's batches, call "
            "fold_backbone(model) of mcore_prefix_tree.integrations.trl"
        )
    if attention_mask is not None:
        raise ValueError(f"{where} does not support attention_mask: the tree sets which tokens each token sees")
    if dropout:
        raise ValueError(f"{where} does not support attention_dropout={dropout}: samples would share the mask; set 0")
    if softcap is not None:
        raise ValueError(f"{where} does not support attn_logit_softcapping={softcap}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"{where} does not support attention that is not causal")
    if len(query) != 1:
        raise ValueError(f"{where} takes one folded batch, [1, P], not a batch of {len(query)}")
    if prefix_tree.subtree_end.device != query.device:
        raise ValueError(
            f"prefix_tree is on {prefix_tree.subtree_end.device}, the model on {query.device}: "
            "pass prefix_tree.with_plans_on(model.device)"
        )
    draws = None if torch.compiler.is_compiling() else prefix_tree.derived("draws", lambda _: LayerDraws())
    if draws is not None:
        _begin(module, draws)
    query, key, value = cast_inputs(*(states[0].transpose(0, 1) for states in (query, key, value)))
    options = AttentionOptions(
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, sinks=s_aux
    )
    # The check of a back-end compares dtypes, which autocast would change.
    with without_autocast(query.device):
        output = tree_attention(
            query,
            key,
            value,
            prefix_tree,
            softmax_scale=options.softmax_scale,
            backend=_backend(prefix_tree_backend, prefix_tree, Case.of(query, key, value, options)),
            window=options.window,
            sinks=options.sinks,
        )
    if draws is not None:
        draws.after(getattr(module, "layer_idx", None), query.device)
    return output[None], None


def _begin(module: torch.nn.Module, draws: LayerDraws) -> None:
    """Reject random draws in an attention layer, and between it and the one before."""
    layer = getattr(module, "layer_idx", None)
    part = random_part(module)
    if part is not None:
        raise ValueError(f"attn_implementation={NAME!r} does not support dropout: in attention layer {layer}, {part}")
    if draws.before(layer):
        raise ValueError(f"attn_implementation={NAME!r} does not support {drew(module, f'before layer {layer}')}")


def _backend(setting: str, tree: TreeMetadata, case: Case) -> str:
    """Return the back-end for a kind of layer, chosen and compared with the reference once per tree."""

    def resolve(tree: TreeMetadata) -> str:
        if setting == AUTO:
            gpu = torch.cuda.get_device_name(case.device) if case.device.type == "cuda" else None
            return choose(case, TreeShape.of([tree]), device_name=gpu).backend
        check_case(setting, case)
        load_backend(setting).check(case)
        return setting

    options = f"window {case.options.window}, sinks {case.options.sinks is not None}"
    return tree.derived(f"backend {setting}, {options}, {case.dtype}, training {case.needs_grad}", resolve)


def pass_mask(*, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **_: Any) -> torch.Tensor | None:
    """Make no mask, as Transformers calls a mask function; a caller's mask reaches :func:`attend`, which rejects it.

    Raises:
        ValueError: the model adds its own mask, for example one for images.
    """
    if use_vmap:
        raise ValueError(f"attn_implementation={NAME!r} does not support models that add their own attention masks")
    return attention_mask


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, pass_mask)


def check_model(model: Any) -> None:
    """Raise ValueError that names the part of a model that cannot be folded, as it is now.

    Random draws of modules in training mode are among them, so call it again after a change of mode.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    # Flash attention gets all of its description in arguments; other layers may get theirs in a mask only.
    if not model._supports_flash_attn:
        raise ValueError(f"{name} does not support flash attention, so its layers may not describe their attention")
    if strange := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(strange))}, which cannot be folded")
    if mixers := {type(part).__name__ for part in model.modules() if isinstance(part, _MIXERS)}:
        raise ValueError(f"{name} mixes tokens by {', '.join(sorted(mixers))}, which cannot be folded")
    if ropes := _rope_types(config) & _BATCH_ROPES:
        raise ValueError(f"{name} has rope_type={ropes.pop()!r}, which depends on the longest sample of a batch")
    if part := random_part(model):
        raise ValueError(f"{name} does not support dropout when it is folded: {part}")


def _rope_types(config: Any) -> set[str]:
    # Transformers 4 calls it rope_scaling.
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [part for part in parameters.values() if isinstance(part, Mapping)] or [parameters]
    return {part.get("rope_type", "default") for part in each}


def model_inputs(model: Any, layout: FlatLayout, *, backend: str = AUTO) -> dict[str, Any]:
    """Return the keyword arguments of a model call that computes a folded layout.

    Args:
        model: causal LM with ``attn_implementation="prefix_tree"``.
        layout: layout that :func:`mcore_prefix_tree.fold` returned.
        backend: key of :data:`~mcore_prefix_tree.attention.BACKENDS`, or ``"auto"``.

    Returns:
        ``input_ids`` and ``position_ids``, int64 ``[1, P]``, and the arguments of :func:`attend`.

    Raises:
        ValueError: the model cannot be folded, or has another attention implementation; samples have routes.
    """
    check_setting(backend)
    check_model(model)
    if (has := model.config.get_text_config()._attn_implementation) != NAME:
        raise ValueError(
            f"{type(model).__name__} has attn_implementation={has!r}; load it with attn_implementation={NAME!r}, or "
            f"call model.set_attn_implementation({NAME!r})"
        )
    if layout.routes is not None:
        raise ValueError(
            "samples have the field 'routed_experts', which models of Transformers do not take: their routers choose "
            "the experts; remove the field"
        )
    metadata = TreeMetadata.from_layout(layout, device=model.device)
    return {
        "input_ids": upload(layout.input_ids, model.device).long()[None],
        "position_ids": metadata.tree_position_ids.long()[None],
        "prefix_tree": metadata,
        "prefix_tree_backend": backend,
        "use_cache": False,
    }


def sample_logprobs(model: Any, layout: FlatLayout, *, backend: str = AUTO) -> list[torch.Tensor]:
    """Return the log-probability of each token of each sample given the tokens before it.

    Args:
        model, layout, backend: see :func:`model_inputs`.

    Returns:
        ``[n]`` for each sample, in the order of samples; entry t scores ``tokens[t]``, and entry 0 is 0. Logits are
        divided by the temperature of the samples, if they have one, and those outside a token's sampling mask are not
        part of its distribution.

    Raises:
        ValueError: see :func:`model_inputs`; or the model drew random numbers.
    """
    inputs = model_inputs(model, layout, backend=backend)
    draws = Draws(model.device)
    logits = model(**inputs).logits[0]
    if draws.any(coins=model.config.get_text_config().num_hidden_layers):
        raise ValueError(f"{type(model).__name__} does not support {drew(model, 'in its forward pass')}")
    temperature = None if layout.temperature is None else upload(layout.temperature, logits.device)
    edges = Edges.from_layout(layout, device=logits.device)
    return restore(edge_logprobs(logits, edges, temperature=temperature)[0], layout)
