"""Models of Hugging Face folders, built and filled by Megatron-Bridge.

Its providers are configurations that build a ``GPTModel``; its bridges convert weights in both directions, on
any parallel layout. This file gives a provider our layers and the recipe's layout.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model

from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.provider import provided_spec
from mcore_prefix_tree.mcore.trainer.fields import (
    check_experts,
    check_latent_layers,
    check_not_decided,
    check_transformer_engine,
    defaults_of_run,
    local_layers,
    settings_of_run,
    typed_settings,
)
from mcore_prefix_tree.recipe import ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.recipe.hf import HuggingFaceFolder

_INSTALL = (
    "model.hf needs Megatron-Bridge 0.6 with Python 3.12, megatron-core 0.19 and TransformerEngine; install it with "
    "pip install --no-deps -r requirements-bridge.txt, see docs/huggingface.md"
)
# What providers ask for and a recipe does not, unless model.transformer says so: kernels of other packages, losses and
# updates that balance experts, and multi-token prediction, which folding cannot do.
_OFF: dict[str, Any] = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "persist_layer_norm": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_bias_update_rate": 0.0,
    "mtp_num_layers": None,
}
# Keys of a recipe's model by the names that providers have for them.
_NAMES = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "ffn_hidden_size": "ffn_hidden_size",
    "kv_channels": "kv_channels",
    "vocab_size": "vocab_size",
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
    "normalization": "normalization",
    "swiglu": "gated_linear_unit",
    "add_bias_linear": "add_bias_linear",
    "qk_layernorm": "qk_layernorm",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# What Megatron-Core has in its source for the rotary embeddings of Llama 3.1.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What DeepSeek-V3's layers do in Megatron-Core or in transformers whatever a configuration says: scores of experts are
# normalised, rotary channels interleaved, and transformers' latent norms have this epsilon.
_DEEPSEEK3 = {"norm_topk_prob": True, "rope_interleave": True, "rms_norm_eps": 1e-6}
# Buffers that older releases of transformers wrote; they follow from the configuration.
_BUFFER = "rotary_emb.inv_freq"


def auto_bridge() -> Any:
    """Return ``megatron.bridge.AutoBridge``.

    Raises:
        RecipeError: it cannot be imported; says how to install it.
    """
    if sys.version_info < (3, 12):
        raise RecipeError(f"{_INSTALL} (this is Python {sys.version_info[0]}.{sys.version_info[1]})")
    # It logs a traceback for every optional package that is missing.
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise RecipeError(f"{_INSTALL} ({error})") from error
    finally:
        logging.disable(before)
    return AutoBridge


def bridge_of(path: str) -> Any:
    """Return Megatron-Bridge's bridge of a folder; weights are read when they are converted.

    Raises:
        RecipeError: it does not know the architecture, or cannot be imported.
    """
    kind = auto_bridge()
    try:
        return kind.from_hf_pretrained(path, trust_remote_code=False)
    except Exception as error:  # its own words are a page
        architecture = HuggingFaceFolder.read(path).config["architectures"][0]
        raise RecipeError(
            f"model.hf={path}: Megatron-Bridge cannot build {architecture} ({_first_line(error)}); for which models "
            "were tested see docs/huggingface.md"
        ) from error


def provider_of(model: ModelConfig, parallel: ParallelConfig, *, on_gpu: bool) -> Any:
    """Return the provider of a recipe's folder, with our layers: a ``TransformerConfig``.

    Raises:
        RecipeError: Megatron-Bridge cannot be imported, does not know the architecture or has layers of its own for it;
            or the parallel layout does not fit.
    """
    assert model.hf is not None
    check_experts(model)
    provider = bridge_of(model.hf).to_megatron_provider(load_weights=False)
    _check_attention(model.hf, provider)
    if model.transformer_impl == "transformer_engine":
        check_transformer_engine()
        spec: Any = partial(provided_spec, provider.transformer_layer_spec)
    else:
        _check_stock(model, provider)
        spec = local_layers
    if provider.vocab_size % parallel.tensor_model_parallel_size:
        raise RecipeError(
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size} does not divide the vocabulary "
            f"of model.hf={model.hf}, {provider.vocab_size}: logits of padding would count as tokens"
        )
    fixed = settings_of_run(model, parallel, on_gpu=on_gpu) | {"should_pad_vocab": False}
    fixed["transformer_layer_spec"] = spec
    check_not_decided(model, fixed)
    defaults = _OFF | defaults_of_run(parallel)
    if model.transformer_impl == "local":
        defaults["moe_grouped_gemm"] = False  # TransformerEngine's
    kind = TransformerConfig
    if isinstance(provider, MLATransformerConfig):
        kind = MLATransformerConfig
        check_latent_layers(model, parallel, on_gpu=on_gpu)
    settings = fixed | {name: value for name, value in defaults.items() if hasattr(provider, name)}
    try:
        provider.apply_overrides_and_finalize(overrides=settings | typed_settings(model, kind))
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(
            f"model.hf={model.hf}: megatron-core refuses this model or parallel layout: {_first_line(error)}"
        ) from error
    return provider


def _check_stock(model: ModelConfig, provider: Any) -> None:
    """Reject local layers where Megatron-Bridge composes other ones than Megatron-Core's."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec

    spec = provider.transformer_layer_spec
    spec = spec.func if isinstance(spec, functools.partial) else spec
    stock = spec in (default_layer_spec, get_gpt_decoder_block_spec)
    if not stock or type(provider).provide is not GPTModelProvider.provide:
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge has layers of its own for this architecture, of TransformerEngine; "
            "set model.transformer_impl=transformer_engine"
        )


def _check_attention(path: str, provider: Any) -> None:
    """Reject settings of a configuration that Megatron-Bridge would pass over without a word.

    Raises:
        RecipeError: names the setting.
    """
    config = HuggingFaceFolder.read(path).config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    supported = {
        "default": True,
        "llama3": provider.rope_scaling and all(rope.get(name, value) == value for name, value in _LLAMA3.items()),
        "linear": getattr(provider, "seq_len_interpolation_factor", None) == rope.get("factor"),
        "yarn": provider.position_embedding_type == "yarn" or isinstance(provider, MLATransformerConfig),
    }
    if not supported.get(kind, False):
        raise RecipeError(
            f"model.hf={path}: Megatron-Bridge has no rotary embeddings with these settings for this architecture: "
            f"{rope}"
        )
    fixed = _DEEPSEEK3 if config.get("model_type") == "deepseek_v3" else {}
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise RecipeError(
                f"model.hf={path}: config.json has {name}={config[name]}, and Megatron-Core's layers of this "
                f"architecture would not compute what transformers does unless it is {value}"
            )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and not provider.window_size:
        raise RecipeError(
            f"model.hf={path}: Megatron-Bridge has no sliding window for this architecture, and config.json has "
            f"sliding_window={window}"
        )


def described(model: ModelConfig, provider: Any) -> ModelConfig:
    """Return a recipe's model with the architecture of its folder, as if the recipe had set it.

    Args:
        model: of the recipe.
        provider: from :func:`provider_of`.
    """
    if model.hf is None:
        return model
    sizes = {key: getattr(provider, name) for key, name in _NAMES.items()}
    kind = MLATransformerConfig if isinstance(provider, MLATransformerConfig) else TransformerConfig
    further = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(kind)
        if re.match("moe_|num_moe|multi_latent|q_lora|kv_lora|qk_.*head_dim|v_head|window_|layernorm_ep", field.name)
        for value in (getattr(provider, field.name),)
        if value != field.default and isinstance(value, int | float | str | list | tuple)
    }
    untied = not provider.share_embeddings_and_output_weights
    return dataclasses.replace(
        model, **sizes, untie_embeddings_and_output_weights=untied, transformer=further | model.transformer
    )


def provided(provider: Any, **ends: Any) -> Any:
    """Return one chunk of a provider's model, with new weights.

    Args:
        provider: from :func:`provider_of`.
        ends: ``pre_process``, ``post_process`` and ``vp_stage``.
    """
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(**ends)


def load_folder(path: str, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill a model with the weights of its folder; all ranks together.

    Raises:
        RecipeError: the folder lacks a weight of the model, or has one that the model does not read.
    """
    bridge, models = bridge_of(path), unwrap_model(list(chunks))
    folder = HuggingFaceFolder.read(path)
    tasks = bridge.get_conversion_tasks(models)
    unread = sorted(folder.files.keys() - {name for task in tasks for name in _sources(task)} - _beyond(folder))
    if unread:
        raise RecipeError(
            f"model.hf={path} has '{unread[0]}', which Megatron-Bridge's model does not read"
            f"{_and_others(unread)}; its answers would differ from transformers'"
        )
    with torch.no_grad():
        for parameter in chain.from_iterable(one.parameters() for one in models):
            parameter.fill_(torch.nan)
    try:
        bridge.load_hf_weights(models)
    except Exception as error:
        raise RecipeError(f"model.hf={path}: its weights do not fit its config.json: {_first_line(error)}") from error
    left = [name for one in models for name, value in one.named_parameters() if bool(value.isnan().any())]
    missing = sorted(set(chain.from_iterable(everyone(left))))
    if missing:
        raise RecipeError(
            f"model.hf={path} lacks the weights of {missing[0]}{_and_others(missing)}, or they are NaN; download it "
            "again"
        )


def _sources(task: Any) -> Iterable[str]:
    """Names of the folder's weights that a conversion reads."""
    if task is None:
        return ()
    names = task.mapping.hf_param
    return (names,) if isinstance(names, str) else names.values()


def _beyond(folder: HuggingFaceFolder) -> set[str]:
    """Names of weights that a language model does not use: layers that predict further tokens, and what is derived."""
    tied = {"lm_head.weight"} if folder.config.get("tie_word_embeddings") else set()
    return tied | {name for name in folder.files if is_untrained(folder, name)}


def is_untrained(folder: HuggingFaceFolder, name: str) -> bool:
    """Return whether training leaves a weight alone: a table of rotary embeddings, or a layer behind the model's last.

    Multi-token prediction has such layers, which are not built.
    """
    found = _LAYER.match(name)
    return _BUFFER in name or (found is not None and int(found[1]) >= folder.config["num_hidden_layers"])


def _and_others(names: Sequence[str]) -> str:
    return "" if len(names) == 1 else f" and {len(names) - 1} more"


def _first_line(error: Exception) -> str:
    lines = [line.strip(" ✗") for line in str(error).splitlines()]
    return f"{type(error).__name__}: {next((line for line in lines if line), '')}"[:300]
