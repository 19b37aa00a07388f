"""Settings of a folder that Megatron-Bridge's provider would pass over: mended, or rejected.

Each rule was found by training tiny models whose configurations differ in one setting; see docs/huggingface.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

from mcore_prefix_tree.mcore.seam.core_attention import layer_window
from mcore_prefix_tree.mcore.seam.tree_layers import names_own_layers
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.settings.hf_families import COMPARED, RENAMED, WITHOUT_EXPERTS
from mcore_prefix_tree.settings.hf_folder import CONFIG, HuggingFaceFolder

# Constants in Megatron-Core's source for the rotary embeddings of Llama 3.1.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Defaults of transformers for keys that a configuration lacks, and Megatron-Core has no value for.
_YARN = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True}
_YARN_SCALES = ("yarn_mscale", "yarn_mscale_all_dim")
# Architectures that turn a share of the channels; transformers 5 keeps it in a place that Megatron-Bridge skips.
_PARTLY_ROTARY = ("glm4_moe", "minimax_m2", "qwen3_next")

# Keys that Megatron-Bridge reads of a configuration by its model_type, and transformers' has not: of what transformers
# does always, or of what settings_of_folder finds under another key.
READ_BY_BRIDGE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"indexer_rope_interleave": False},
    "gemma4_text": {"allow_global_per_layer_attribute_access": True},  # or transformers raises; see _heads_by_kind
    "glm_moe_dsa": {"indexer_rope_interleave": True},
    "hy_v3": {"first_k_dense_replace": 0},
}
# Fields of Gemma 4's providers, with experts and without, for layers without a window, by the settings of a layer.
_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
_DENSE_HEADS = {"head_dim": "global_kv_channels", "num_key_value_heads": "num_global_query_groups"}
# Families whose depths of multi-token prediction are trained: those whose mapping in Megatron-Bridge was tried.
TRAINED_DEPTHS = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text")
NUM_DEPTHS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of folders; transformers has no such layers


def read_config(folder: HuggingFaceFolder) -> Any:
    """Return transformers' configuration of a folder: of a text model alone, and by transformers' name.

    Raises RecipeError, in transformers' words, for one that contradicts itself.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    for name, (own, _) in RENAMED.items():
        if name not in CONFIG_MAPPING:
            AutoConfig.register(name, type(name, (CONFIG_MAPPING[own],), {"model_type": name}))
    options = {"architectures": [folder.architecture]}
    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, auto_map={}, **options)
        kind = CONFIG_MAPPING[folder.config["model_type"]]
        if not folder.names:
            is_renamed = type(config).model_type in RENAMED
            return kind(**{**config.to_dict(), "model_type": kind.model_type}) if is_renamed else config
        given, known = config.text_config.to_dict(), kind().to_dict()
        rope = {name: value for name, value in given["rope_parameters"].items() if not name.startswith("mrope")}
        settings = {name: value for name, value in given.items() if name in known and name != "model_type"}
        fixed = {"rope_parameters": rope, "tie_word_embeddings": config.tie_word_embeddings}
        return kind(**settings | fixed | options)
    except Exception as error:  # of any kind: transformers also finds contradictions by computing with settings
        words = " ".join(str(error).split())
        raise RecipeError(
            f"model.hf={folder.path}: transformers refuses {CONFIG} ({type(error).__name__}: {words})"
        ) from error


def settings_of_folder(path: str, config: Mapping[str, Any], provider: Any, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields of a provider that its folder decides and Megatron-Bridge left unset.

    ``config`` is transformers' configuration of the folder, with its defaults. Raises RecipeError for a setting that
    the provider's layers would pass over, and for layers that the layout's ranks cannot share.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, architecture = config["model_type"], HuggingFaceFolder.read(path).architecture
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) != architecture:
        raise RecipeError(
            f"model.hf={path}: config.json has the architecture {architecture}, and model_type={kind}, which is "
            f"{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)} in transformers; correct one of them"
        )
    tensor_parallel = parallel.tensor_model_parallel_size
    if tensor_parallel > 1 and kind == "olmoe":
        raise RecipeError(
            f"model.hf={path}: Megatron-Bridge's OLMoE normalises the queries of all heads together, which tensor-"
            f"parallel ranks do not have; set parallel.tensor_model_parallel_size=1 (given {tensor_parallel})"
        )
    _check_rotary(path, config, provider)
    _check_needed(path, config)
    _check_groups(path, config)
    _check_stages(path, config, provider.num_layers, parallel)
    _check_windows(path, config, provider)
    # Some bridges, for example DeepSeek-V3's, leave it at a constant.
    fields: dict[str, Any] = {"share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings"))}
    rope, is_latent = _read_rope(config), isinstance(provider, MLATransformerConfig)
    if getattr(provider, "position_embedding_type", None) == "yarn":
        fields |= {name: value for name, value in _YARN.items() if getattr(provider, name) is None}
    # transformers reads neither for the rotary embeddings unless both are set.
    if _rope_kind(rope) == "yarn" and not (rope.get("mscale") and rope.get("mscale_all_dim")):
        fields |= {"mscale": 1.0, "mscale_all_dim": 0.0} if is_latent else dict.fromkeys(_YARN_SCALES)
    if config.get("mlp_layer_types"):
        fields["moe_layer_freq"] = [int(layer == "sparse") for layer in config["mlp_layer_types"]]
    if kind == "gemma4_text":
        fields |= _fields_of_gemma4(path, config, provider)
    if "shared" in (config.get("indexer_types") or ()):
        fields |= _shared_choice(path, config["indexer_types"])
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is not None and kind in _PARTLY_ROTARY:
        fields["rotary_percent"] = float(share)
    elif share not in (None, 1.0, provider.rotary_percent):
        raise RecipeError(
            f"model.hf={path}: config.json has partial_rotary_factor={share}, and Megatron-Bridge turns all channels "
            "of this architecture"
        )
    return fields


def _fields_of_gemma4(path: str, config: Mapping[str, Any], provider: Any) -> dict[str, Any]:
    """Return the fields of Gemma 4's providers that Megatron-Bridge does not find, or leaves to the layers."""
    if not names_own_layers(provider):
        return _heads_by_kind(path, config, _HEADS)
    # Only its layers know that they normalise queries and keys, whose gradients Megatron-Core then adds up over
    # tensor-parallel ranks; and whether a layer has a window is no integer.
    windows = [int(one == "sliding_attention") for one in config["layer_types"]]
    found = {"qk_layernorm": True, "make_vocab_size_divisible_by": 1, "window_attn_skip_freq": windows}
    return found | _heads_by_kind(path, config, _DENSE_HEADS)


def _heads_by_kind(path: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Return the fields of heads in Gemma 4's layers without a window, which transformers keeps layer by layer."""
    own, common = config.get("per_layer_config") or {}, {name: config[name] for name in names}
    layers = [common | own.get(str(at), {}) for at in range(len(config["layer_types"]))]
    by_kind = {"sliding_attention": common, "full_attention": layers[-1]}
    if layers[-1].keys() != common.keys() or layers != [by_kind.get(kind) for kind in config["layer_types"]]:
        raise RecipeError(
            f"model.hf={path}: config.json has per_layer_config={dict(own)}, and Megatron-Bridge's layers of this "
            f"architecture differ only in {' and '.join(names)}, of those without a window"
        )
    # Megatron-Bridge fills the unused keys of a layer that takes another's by num_key_value_heads.
    if config["num_kv_shared_layers"] and layers[-1]["num_key_value_heads"] != common["num_key_value_heads"]:
        raise RecipeError(
            f"model.hf={path}: config.json has num_kv_shared_layers={config['num_kv_shared_layers']} and "
            f"per_layer_config={dict(own)}, and Megatron-Bridge loads layers that share keys only with "
            f"num_key_value_heads={common['num_key_value_heads']} in all"
        )
    return {name: layers[-1][key] for key, name in names.items()}


def _shared_choice(path: str, indexers: Sequence[str]) -> dict[str, int]:
    """Return the fields by which layers take the keys that one before chose, from transformers' ``indexer_types``."""
    from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer

    layers = range(1, len(indexers) + 1)
    for offset, every in itertools.product(layers, layers[1:]):
        if all(is_dsa_skip_topk_layer(at, offset, every) == (indexers[at - 1] == "shared") for at in layers):
            return {"dsa_indexer_skip_topk_offset": offset, "dsa_indexer_topk_freq": every}
    raise RecipeError(
        f"model.hf={path}: config.json has indexer_types={list(indexers)}, and Megatron-Core's layers choose keys at "
        "regular distances"
    )


def _read_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _check_rotary(path: str, config: Mapping[str, Any], provider: Any) -> None:
    rope = _read_rope(config)
    supported: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        "default": lambda one: True,
        "llama3": lambda one: (
            getattr(provider, "rope_scaling", False)
            and all(one.get(name, value) == value for name, value in _LLAMA3.items())
        ),
        "linear": lambda one: getattr(provider, "seq_len_interpolation_factor", None) == one.get("factor"),
        "yarn": lambda one: (
            one.get("attention_factor") is None
            and (provider.position_embedding_type == "yarn" or isinstance(provider, MLATransformerConfig))
            # Megatron-Core's YaRN turns all channels.
            and one.get("partial_rotary_factor", 1.0) == 1.0
            # The scores of latent attention are scaled, too.
            and (not isinstance(provider, MLATransformerConfig) or one.get("mscale") or not one.get("mscale_all_dim"))
        ),
    }
    each: Sequence[Mapping[str, Any]] = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    if each[0] is not rope:  # for each kind of layer
        # Gemma's layers without a window have a separate factor.
        factor = getattr(provider, "rope_scaling_factor", None)
        supported["linear"] = lambda one: one is rope.get("full_attention") and one.get("factor") == factor
    if config["model_type"] == "gemma4_text":
        full, is_dense = rope.get("full_attention"), names_own_layers(provider)
        share = provider.full_attention_rope_partial_factor if is_dense else provider.global_rotary_percent
        supported = {
            "default": lambda one: one is not full,
            "proportional": lambda one: (
                one is full and one.get("partial_rotary_factor") == share and one.get("factor", 1.0) == 1.0
            ),
        }
    for one in each:
        is_supported = supported.get(_rope_kind(one))
        if is_supported is None or not is_supported(one):
            raise RecipeError(
                f"model.hf={path}: Megatron-Bridge has no rotary embeddings with these settings for this architecture: "
                f"{dict(rope)}"
            )


def _check_needed(path: str, config: Mapping[str, Any]) -> None:
    given = {**config, **_read_rope(config)}
    allowed_by_name = COMPARED[config["model_type"]] if config.get("enable_moe_block", True) else WITHOUT_EXPERTS
    for name, allowed in allowed_by_name.items():
        value = given.get(name)
        # A range would look for anything but an integer by counting.
        is_counted = isinstance(allowed, range) and not isinstance(value, int)
        if is_counted or value not in allowed:
            words = f"at least {allowed.start}" if isinstance(allowed, range) else " or ".join(map(str, allowed))
            raise RecipeError(
                f"model.hf={path}: config.json has {name}={value}, and Megatron-Core's layers of this "
                f"architecture would compute other values than transformers unless it is {words}"
            )


def _check_stages(path: str, config: Mapping[str, Any], layers: int, parallel: ParallelConfig) -> None:
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    if layers % stages:
        raise RecipeError(
            f"model.hf={path} has {layers} layers, which {stages} stages of a pipeline cannot share evenly; change "
            "parallel.pipeline_model_parallel_size or virtual_pipeline_model_parallel_size"
        )
    if "shared" in (config.get("indexer_types") or ())[:: layers // stages]:
        raise RecipeError(
            f"model.hf={path}: with {stages} stages of a pipeline, the first layer of one takes the keys that a layer "
            "of another chose (indexer_types of config.json); change parallel.pipeline_model_parallel_size"
        )


def _check_groups(path: str, config: Mapping[str, Any]) -> None:
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    # transformers chooses groups by their two best experts, Megatron-Core by as many as each may give.
    if chosen < groups and config["num_experts_per_tok"] // chosen != 2:
        raise RecipeError(
            f"model.hf={path}: config.json has num_experts_per_tok={config['num_experts_per_tok']} and topk_group="
            f"{chosen}, and Megatron-Core chooses groups of experts as transformers does only with two experts a group"
        )


def _check_windows(path: str, config: Mapping[str, Any], provider: Any) -> None:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and not provider.window_size:
        raise RecipeError(
            f"model.hf={path}: Megatron-Bridge has no sliding window for this architecture, and config.json has "
            f"sliding_window={window}"
        )
    kinds = config.get("layer_types")
    built = [
        "full_attention" if layer_window(provider, layer) is None else "sliding_attention"
        for layer in range(1, provider.num_layers + 1)
    ]
    if window and kinds and list(kinds) != built:
        raise RecipeError(
            f"model.hf={path}: config.json has layer_types={kinds}, and Megatron-Bridge's layers of this architecture "
            f"are {built}"
        )


def check_own_layers(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Reject other layers than Megatron-Core's, and stages, for a model whose layers Megatron-Bridge names itself."""
    if model.transformer_impl == "transformer_engine":
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge builds this architecture of Megatron-Core's own layers; set "
            "model.transformer_impl=local"
        )
    if parallel.pipeline_model_parallel_size > 1:
        raise RecipeError(
            f"model.hf={model.hf}: Megatron-Bridge builds this architecture in one stage; set parallel."
            f"pipeline_model_parallel_size=1 (given {parallel.pipeline_model_parallel_size}) and split it by tensor "
            "parallelism"
        )


def check_depths(model: ModelConfig, config: Mapping[str, Any], provider: Any) -> None:
    """Reject depths of multi-token prediction that the folder lacks, or that cannot be read from it or trained."""
    asked = f"model.transformer.mtp_num_layers={model.transformer['mtp_num_layers']}"
    way_out = "remove it; an exported folder then has its depths unchanged"
    assert model.hf is not None
    has_pictures, kind = bool(HuggingFaceFolder.read(model.hf).names), config["model_type"]
    if kind not in TRAINED_DEPTHS or has_pictures:
        raise RecipeError(
            f"{asked}: depths in folders of {'pictures and text' if has_pictures else kind} are not trained, only "
            f"those of {', '.join(TRAINED_DEPTHS)}; {way_out}"
        )
    if model.lora is not None:
        raise RecipeError(f"{asked} with model.lora: the depths would get no adapters; {way_out}")
    found = provider.mtp_num_layers or 0
    if found != model.transformer["mtp_num_layers"]:
        raise RecipeError(
            f"{asked}, but the config.json of model.hf={model.hf} has {found} ({' or '.join(NUM_DEPTHS)}); {way_out}"
        )
