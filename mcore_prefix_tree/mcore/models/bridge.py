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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import chain
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model
from packaging.requirements import Requirement

from mcore_prefix_tree.cpu.emulation import transformer_engine_names
from mcore_prefix_tree.mcore.models.bridge_settings import (
    NUM_DEPTHS,
    READ_BY_BRIDGE,
    TRAINED_DEPTHS,
    check_depths,
    check_own_layers,
    read_config,
    settings_of_folder,
)
from mcore_prefix_tree.mcore.models.bridge_weights import (
    KeepsFailure,
    TextWeights,
    check_copies,
    check_weights,
    copies_in,
    unread_weights,
)
from mcore_prefix_tree.mcore.models.config_fields import (
    SAME_NAMES,
    check_experts,
    check_hybrid,
    check_latent_layers,
    check_not_decided,
    check_transformer_engine,
    defaults_of_run,
    engine_layers,
    has_pattern,
    latent_layers,
    local_layers,
    settings_of_run,
    stack_of_folder,
    typed_settings,
)
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.core_attention import window_settings
from mcore_prefix_tree.mcore.seam.scalar_output_layer import ScalarHead
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees, names_own_layers
from mcore_prefix_tree.settings import LoraConfig, ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.settings.hf_folder import LM_HEAD, SCORE, HuggingFaceFolder
from mcore_prefix_tree.utils.versions import install_command, installed_version_of, list_requirements

_NEEDS = "model.hf needs Megatron-Bridge 0.6 with Python 3.12, megatron-core 0.19 and, on a GPU, TransformerEngine"
# Settings of providers that a recipe turns off, unless model.transformer sets them: kernels of other packages, losses
# beside the objective's, updates that balance experts, and multi-token prediction, which a recipe asks for.
OFF: dict[str, Any] = {
    **dict.fromkeys(("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "persist_layer_norm"), False),
    **dict.fromkeys(("moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap"), False),
    **dict.fromkeys(("dsa_indexer_loss_coeff", "moe_aux_loss_coeff", "moe_router_bias_update_rate"), 0.0),
    **dict.fromkeys(("moe_z_loss_coeff", "mtp_num_layers", "mtp_hybrid_override_pattern"), None),
}
# Keys of a recipe's model by the names that providers have for them.
_NAMES = {"swiglu": "gated_linear_unit"} | {
    name: name
    for name in (
        *(*SAME_NAMES, "vocab_size", "hybrid_layer_pattern", "position_embedding_type"),
        *("rotary_base", "rotary_percent", "rope_scaling", "rope_scaling_factor"),
    )
}
# Names of a provider's further fields that describe its model.
_DESCRIBED = re.compile(
    "moe_|num_moe|multi_latent|q_lora|kv_lora|qk_.*head_dim|v_head|window_|layernorm_ep|linear_|experimental_attention|"
    "attention_output_gate|mamba_|dsa_indexer_"
)
# In the names of an adapter's parameters.
ADAPTER = ".adapter."


def auto_bridge() -> Any:
    """Return ``megatron.bridge.AutoBridge``; the RecipeError without Megatron-Bridge says how to install it."""
    if sys.version_info < (3, 12):
        raise RecipeError(f"{_NEEDS}; this is Python {sys.version_info[0]}.{sys.version_info[1]}")
    # It logs a traceback for every optional package that is missing, and has the root's logger print all of INFO.
    root = logging.root
    before, level, handlers = root.manager.disable, root.level, list(root.handlers)
    logging.disable(logging.INFO)
    try:
        with transformer_engine_names():
            from megatron.bridge import AutoBridge

            from mcore_prefix_tree.mcore.models import further_bridges  # noqa: F401  which registers them
    except ImportError as error:
        raise RecipeError(_not_imported(error)) from error
    finally:
        logging.disable(before)
        root.setLevel(level)
        root.handlers[:] = handlers
    return AutoBridge


def _not_imported(error: ImportError) -> str:
    """Say why Megatron-Bridge cannot be imported: a transformers that it does not fit, or something that is missing."""
    installed = installed_version_of("transformers")
    if installed is not None and not _fits(installed):
        wanted = transformers_of_bridge()
        return (
            f"model.hf: Megatron-Bridge cannot be imported ({error}): it needs {wanted}, and {installed} is "
            f"installed; pip install '{wanted}'"
        )
    return (
        f"{_NEEDS} ({error}); install it with {install_command('bridge')} and pip install --no-deps "
        "'megatron-bridge==0.6.2', see docs/huggingface.md"
    )


def _fits(transformers: str) -> bool:
    wanted = transformers_of_bridge()
    return wanted is None or wanted.specifier.contains(transformers, prereleases=True)


def transformers_of_bridge() -> Requirement | None:
    """Return the releases of transformers that Megatron-Bridge imports; None if this package is read from a path."""
    try:
        found = [Requirement(text) for text in list_requirements("bridge")]
    except PackageNotFoundError:
        return None
    return next(requirement for requirement in found if requirement.name == "transformers")


def load_bridge(path: str) -> Any:
    """Return the bridge of a folder; raise RecipeError if Megatron-Bridge is missing or lacks the architecture."""
    folder, installed = HuggingFaceFolder.read(path), installed_version_of("transformers")
    # Before Megatron-Bridge, which would try an invalid one four times and call it a problem of the network.
    config: Any = None if installed is None or not _fits(installed) else read_config(folder)
    kind = auto_bridge()
    try:
        # Of a model with a scalar head the bridge of the language model converts all but the head. Megatron-Bridge
        # would look for the class that the code of a folder names.
        bridge = kind.from_hf_pretrained(
            path, trust_remote_code=False, architectures=[folder.architecture], auto_map={}
        )
        bridge.hf_pretrained.config = config
        if folder.names:
            bridge.hf_pretrained.state.source = TextWeights(folder, bridge.hf_pretrained.state.source)
        own = type(config)()
    except Exception as error:  # its own words are a page
        raise _cannot_build(path, error) from error
    # Megatron-Bridge reads some keys of any configuration, also if transformers' model has no such setting.
    depths = NUM_DEPTHS if config.model_type in TRAINED_DEPTHS else ()
    read = READ_BY_BRIDGE.get(config.model_type, {})
    for one in (own, config):
        one.update(read)
    for name in vars(config).keys() & folder.config.keys() - set(depths):
        if not hasattr(own, name):
            delattr(config, name)
    return bridge


def _cannot_build(path: str, error: Exception) -> RecipeError:
    architecture = HuggingFaceFolder.read(path).architecture
    return RecipeError(
        f"model.hf={path}: Megatron-Bridge cannot build {architecture} ({_first_line(error)}); for which models were "
        "tested see docs/huggingface.md"
    )


def make_provider(model: ModelConfig, parallel: ParallelConfig, *, on_gpu: bool, only_stock: bool = False) -> Any:
    """Return the provider of a recipe's folder, with our layers: a ``TransformerConfig``.

    ``only_stock`` rejects architectures that Megatron-Bridge builds from other layers than Megatron-Core's. Raises
    RecipeError if Megatron-Bridge cannot build the model, or not in this parallel layout.
    """
    assert model.hf is not None
    bridge = load_bridge(model.hf)
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
    except Exception as error:
        raise _cannot_build(model.hf, error) from error
    if only_stock and not _is_stock(provider):
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge builds this architecture from other layers than Megatron-Core's "
            "GPT, and only `mcore-prefix-tree train --hf` takes them"
        )
    if model.lora is not None:
        _check_lora(model, model.lora, provider, tensor_parallel=parallel.tensor_model_parallel_size)
    check_experts(provider.num_moe_experts, parallel)
    config = bridge.hf_pretrained.config.to_dict()
    if model.transformer.get("mtp_num_layers"):
        check_depths(model, config, provider)
    of_folder = settings_of_folder(model.hf, config, provider, parallel)
    is_hybrid = has_pattern(provider)
    if names_own_layers(provider):
        check_own_layers(model, parallel)
        spec: Any = None
    elif is_hybrid:
        spec = stack_of_folder(model, parallel)
    elif model.transformer_impl == "transformer_engine":
        check_transformer_engine()
        spec = partial(engine_layers, provider.transformer_layer_spec)
    else:
        _check_stock(model, provider)
        spec = local_layers
    if provider.vocab_size % parallel.tensor_model_parallel_size:
        raise RecipeError(
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size} does not divide the vocabulary "
            f"of model.hf={model.hf}, {provider.vocab_size}; choose a size that divides it"
        )
    fixed = settings_of_run(model, parallel, on_gpu=on_gpu) | {"should_pad_vocab": False}
    fixed["hybrid_stack_spec" if is_hybrid else "transformer_layer_spec"] = spec
    check_not_decided(model, fixed)
    defaults = OFF | defaults_of_run(parallel)
    if model.transformer_impl == "local":
        defaults["moe_grouped_gemm"] = False  # TransformerEngine's
    kind = TransformerConfig
    if isinstance(provider, MLATransformerConfig):
        kind = MLATransformerConfig
        check_latent_layers(model, parallel, on_gpu=on_gpu)
        fixed["transformer_layer_spec"] = partial(latent_layers, spec)
    settings = of_folder | fixed | {name: value for name, value in defaults.items() if hasattr(provider, name)}
    try:
        provider.apply_overrides_and_finalize(overrides=settings | typed_settings(model, kind))
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(
            f"model.hf={model.hf}: megatron-core refuses this model or parallel layout: {_first_line(error)}"
        ) from error
    if is_hybrid:
        check_hybrid(described(model, provider), parallel, on_gpu=on_gpu)
    return provider


def _is_stock(provider: Any) -> bool:
    """Return whether Megatron-Bridge builds a ``GPTModel``, only from Megatron-Core's layers."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec

    if has_pattern(provider):
        return False
    spec = provider.transformer_layer_spec
    spec = spec.func if isinstance(spec, functools.partial) else spec
    is_stock = spec in (default_layer_spec, get_gpt_decoder_block_spec)
    return is_stock and type(provider).provide is GPTModelProvider.provide


def _check_lora(model: ModelConfig, lora: LoraConfig, provider: Any, *, tensor_parallel: int) -> None:
    """Reject adapters that layers cannot have or ranks cannot share."""
    if lora.r % tensor_parallel:
        raise RecipeError(
            f"model.lora.r={lora.r} is not a multiple of parallel.tensor_model_parallel_size={tensor_parallel}, whose "
            "ranks share it; change one of them"
        )
    if not _is_stock(provider) or isinstance(provider, MLATransformerConfig):
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge builds this architecture from other layers than Megatron-Core's "
            "GPT, and these get no adapters here; remove model.lora"
        )


def _check_stock(model: ModelConfig, provider: Any) -> None:
    """Reject local layers if Megatron-Bridge composes layers other than Megatron-Core's."""
    if provider.num_moe_experts and provider.add_bias_linear:
        raise RecipeError(
            f"model.hf={model.hf}: megatron-core's own experts cannot be trained with biases; set "
            "model.transformer_impl=transformer_engine"
        )
    if not _is_stock(provider):
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge has its own layers for this architecture, of TransformerEngine; "
            "set model.transformer_impl=transformer_engine"
        )


def described(model: ModelConfig, provider: Any) -> ModelConfig:
    """Return a recipe's model with the architecture of the folder's provider, as if the recipe had set it."""
    if model.hf is None:
        return model
    sizes = {key: getattr(provider, name) for key, name in _NAMES.items() if hasattr(provider, name)}
    if isinstance(sizes["rotary_base"], tuple):  # of layers with a window, and of the others
        sizes["rotary_base"] = sizes["rotary_base"][-1]
    kind = MLATransformerConfig if isinstance(provider, MLATransformerConfig) else TransformerConfig
    if kind is MLATransformerConfig:
        sizes |= {"num_query_groups": None, "kv_channels": None}  # as in a recipe, where they have no meaning
    further: dict[str, Any] = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(kind)
        if _DESCRIBED.match(field.name)
        for value in (getattr(provider, field.name),)
        # True is the default of the configuration of latent attention, but not of a recipe.
        if (value != field.default or field.name == "multi_latent_attention")
        and isinstance(value, int | float | str | list | tuple)
    }
    if isinstance(provider.window_size, int):
        size, skip = window_settings(provider)
        further |= {"window_size": list(size or ()), "window_attn_skip_freq": skip}
    untied = not provider.share_embeddings_and_output_weights
    return dataclasses.replace(
        model, **sizes, untie_embeddings_and_output_weights=untied, transformer=further | model.transformer
    )


def provided(provider: Any, *, scalar_head: bool, **ends: Any) -> Any:
    """Return one chunk of a provider's model, with new weights; ``scalar_head`` unties the output layer."""
    if scalar_head:
        provider.share_embeddings_and_output_weights = False
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    chunk = provider.provide(**ends)
    follow_trees(chunk)
    return chunk


def load_folder(path: str, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill a model with the weights of its folder; all ranks together. A scalar head that the folder lacks stays new.

    Raises RecipeError if the folder lacks a weight of the model, or has one that the model does not read.
    """
    with without_scalar_head(chunks) as (models, head):
        _load(path, models, replaced=set() if head is None else {LM_HEAD})
    folder = HuggingFaceFolder.read(path)
    if head is not None and folder.has_scalar_head:
        from safetensors import safe_open

        with safe_open(folder.path / folder.files[SCORE], "pt") as opened, torch.no_grad():
            head.weight.copy_(opened.get_tensor(SCORE))


@contextmanager
def without_scalar_head(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[list[torch.nn.Module], ScalarHead | None]]:
    """Take a scalar head away while Megatron-Bridge, which knows none, converts the rest; yield models and head."""
    models: list[Any] = unwrap_model(list(chunks))
    with_head = [one for one in models if isinstance(getattr(one, "output_layer", None), ScalarHead)]
    heads = [one.output_layer for one in with_head]
    for one in with_head:
        del one.output_layer
    try:
        yield models, next(iter(heads), None)
    finally:
        for one, head in zip(with_head, heads, strict=True):
            one.output_layer = head


def _load(path: str, models: list[Any], *, replaced: set[str]) -> None:
    bridge, folder = load_bridge(path), HuggingFaceFolder.read(path)
    config = bridge.hf_pretrained.config
    bridge.hf_pretrained.state.source = source = KeepsFailure(folder, bridge.hf_pretrained.state.source)
    sources = [task.mapping.hf_param for task in bridge.get_conversion_tasks(models) if task is not None]
    read = replaced.union(*([one] if isinstance(one, str) else one.values() for one in sources))
    read = {folder.names.get(name, name) for name in read}
    names = sorted(folder.files)
    # Of experts that are spread over ranks each rank knows its own.
    is_read = torch.tensor(
        [name in read for name in names], dtype=torch.uint8, device=next(models[0].parameters()).device
    )
    torch.distributed.all_reduce(is_read, torch.distributed.ReduceOp.MAX)
    read = {name for name, one in zip(names, is_read.tolist(), strict=True) if one}
    has_depths = bool(models[0].config.mtp_num_layers)
    copies = copies_in(folder, config, has_depths)
    unread = sorted(folder.files.keys() - read - unread_weights(folder, copies, has_depths))
    if unread:
        raise RecipeError(
            f"model.hf={path} has '{unread[0]}', which Megatron-Bridge's model does not read"
            f"{_and_others(unread)}; its answers would differ from transformers'"
        )
    check_weights(folder, config, read.union(copies), replaced)
    check_copies(folder, {name: own for name, own in copies.items() if name not in replaced})
    with torch.no_grad():
        for _, parameter in _folder_parameters(models):
            parameter.fill_(torch.nan)
    try:
        bridge.load_hf_weights(models)
    except Exception as error:
        raise RecipeError(f"model.hf={path}: its weights do not fit its config.json: {_first_line(error)}") from error
    failures = [failure for failure in everyone(source.failure) if failure is not None]
    if failures:
        raise RecipeError(f"model.hf={path}: {failures[0]}; download the folder again")
    left = [name for name, value in _folder_parameters(models) if bool(value.isnan().any())]
    missing = sorted(set(chain.from_iterable(everyone(left))))
    if missing:
        raise RecipeError(
            f"model.hf={path} lacks the weights of {missing[0]}{_and_others(missing)}, or they are NaN; download it "
            "again"
        )


def _folder_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that are not an adapter's, nor a norm of keys that a layer of Gemma 4 takes from another."""
    modules = chain.from_iterable(one.named_modules() for one in models)
    unused = {f"{name}.k_layernorm.weight" for name, one in modules if getattr(one, "is_kv_shared_layer", False)}
    for name, parameter in chain.from_iterable(one.named_parameters() for one in models):
        if ADAPTER not in name and name not in unused:
            yield name, parameter


def _and_others(names: Sequence[str]) -> str:
    return "" if len(names) == 1 else f" and {len(names) - 1} more"


def _first_line(error: Exception) -> str:
    lines = [line.strip(" ✗") for line in str(error).splitlines()]
    return f"{type(error).__name__}: {next((line for line in lines if line), '')}"[:300]
