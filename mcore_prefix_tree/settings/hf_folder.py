"""Hugging Face model folders: the settings that a recipe takes from one, and the folders that are rejected.

Only JSON and the headers of safetensors files are read here, in milliseconds; nothing that a folder holds is executed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from mcore_prefix_tree.settings.hf_families import COMPARED, RENAMED, TEXT_MODELS
from mcore_prefix_tree.settings.section import collect_faults
from mcore_prefix_tree.utils.inputs import damage_as, local_path, read_text
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Keys of a model that leave its function as it is, up to rounding: how it is computed, initialised and regularised.
SAME_FUNCTION = re.compile(
    "hf|adapter|dtype|transformer_impl|max_position_embeddings"
    "|transformer\\.(.*(recompute|fp8|cuda_graph|_bf16|fus|overlap|dispatcher|grouped_gemm|offload|deterministic|init|loss|balanc|bias_update|dropout).*)"
)
_OF_RECIPE = ("hf", "dtype", "transformer_impl", "transformer", "lora", "adapter")
# Keys that a recipe in a checkpoint has, which is written with all defaults.
_OF_CHECKPOINTS = {"rotary_base", "swiglu", "qk_layernorm"}
# Keys of a recipe's model by the names that configurations have for them.
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_CODE = "auto_map"
# Nemotron-H counts its layers by a list of their kinds, or in older folders by a letter for each.
_LAYER_KINDS, _PATTERN = "layers_block_type", "hybrid_override_pattern"
_ADAPTER = "adapter_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# Keys of a configuration that the function of its model does not depend on.
_NOT_OF_THE_MODEL = (
    "_name_or_path",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# The heads of language models, and of models that give a text one number.
LM_HEAD, SCORE = "lm_head.weight", "score.weight"
_LANGUAGE_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
# Classes with a scalar head that are not named as their language models are.
_CLASSIFIERS = {f"{name}{_LANGUAGE_MODEL}": f"{name}Text{_CLASSIFIER}" for name in ("Gemma3", "Qwen3_5")}
_LANGUAGE_MODELS = {name: model for model, name in _CLASSIFIERS.items()}
_WITH_PICTURES = "ForConditionalGeneration"
_EMBEDDINGS = "embed_tokens.weight"
_BLOCKS = re.compile(r"^blocks\.")
# Folders that are kept: a student's and those of its teachers.
_KEPT = 8

T = TypeVar("T")


def keep_until_changed(read: Callable[[Path], T]) -> Callable[[str | Path], T]:
    """Return a function that reads a folder once, and again after a file in it was written, added or removed."""

    @lru_cache(maxsize=_KEPT)
    def read_state(folder: Path, state: tuple[object, ...]) -> T:
        return read(folder)

    @wraps(read)
    def read_once(path: str | Path) -> T:
        folder = Path(local_path(str(path)))
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
        stats = ((entry.name, entry.stat()) for entry in entries if entry.is_file())
        state = ((name, it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns) for name, it in stats)
        return read_state(folder, tuple(state))

    return read_once


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """A folder of a causal language model, or of one that ends in a scalar head."""

    path: Path
    config: Mapping[str, Any]  # content of config.json; of a model of pictures and text, its text model's part
    files: Mapping[str, str]  # file name of each weight
    dtypes: Mapping[str, str]  # type of each weight as safetensors names it, for example BF16
    shapes: Mapping[str, Sequence[int]]  # shape of each weight
    has_chat_template: bool  # whether the folder holds a tokenizer with a chat template
    # Names in the files of the text model's weights, by those of a model of text alone, if they differ.
    names: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: str | Path) -> HuggingFaceFolder:
        """Read a folder's configuration and the headers of its weights, unless they are unchanged since the last call.

        Raises:
            ValueError: the folder is missing, incomplete or truncated, holds pickles or quantized weights, or its model
                is not a causal language model, or of a family that was not compared; names the file.
            OSError: a file cannot be read.
        """
        return _read_folder(path)

    @property
    def architecture(self) -> str:
        """Return the name of the language model's class in transformers, for any head that this one ends in."""
        name = str(self.config["architectures"][0])
        return _LANGUAGE_MODELS.get(
            name, name.removesuffix(_CLASSIFIER).removesuffix(_LANGUAGE_MODEL) + _LANGUAGE_MODEL
        )

    @property
    def classifier(self) -> str:
        """Return the name of the class with a scalar head."""
        name = self.architecture
        return _CLASSIFIERS.get(name, name.removesuffix(_LANGUAGE_MODEL) + _CLASSIFIER)

    @property
    def has_scalar_head(self) -> bool:
        """Return whether the model gives a number instead of a vocabulary's logits."""
        return str(self.config["architectures"][0]).endswith(_CLASSIFIER)

    def difference(self, other: HuggingFaceFolder) -> str | None:
        """Return a key of ``config.json`` in which another folder is another model; None if it is the same one."""
        mine, its = ({**one.config, **dict.fromkeys(_NOT_OF_THE_MODEL)} for one in (self, other))
        return next((key for key in sorted({*mine, *its}) if mine.get(key) != its.get(key)), None)

    def with_scalar_head(self) -> HuggingFaceFolder:
        """Return the folder with a scalar head in place of the vocabulary's; the same if it has one."""
        if self.has_scalar_head:
            return self
        file = self.files.get(LM_HEAD, max(self.files.values()))
        dtype = self.dtypes.get(LM_HEAD, next(iter(self.dtypes.values())))
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return replace(
            self,
            config={**self.config, "architectures": [self.classifier], **labels},
            files=_without_head(self.files) | {SCORE: file},
            dtypes=_without_head(self.dtypes) | {SCORE: dtype},
            shapes=_without_head(self.shapes) | {SCORE: [1, self.config["hidden_size"]]},
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the keys of a recipe's model that the configuration decides; raises ValueError if it lacks one."""
        for name in SIZES.values():
            if name not in self.config:
                raise ValueError(f"{self.path / CONFIG} lacks '{name}'")
        return {key: self.config[name] for key, name in SIZES.items()}


@keep_until_changed
def _read_folder(folder: Path) -> HuggingFaceFolder:
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} is not a folder with a {CONFIG}; download the model first and give its local folder"
        )
    config, has_chat_template, has_pictures = _read_configs(folder)
    placed = _placed_weights(folder)
    headers = {file: tensors_in(folder / file) for file in sorted({SINGLE} if placed is None else set(placed.values()))}
    files = dict.fromkeys(headers[SINGLE], SINGLE) if placed is None else placed
    tensors = {name: headers[file][name] for name, file in files.items() if name in headers[file]}
    absent = sorted(files.keys() - tensors.keys())
    if absent:
        raise ValueError(f"{folder / files[absent[0]]} lacks '{absent[0]}', which {INDEX} places there")
    other = sorted(name for name, (dtype, _) in tensors.items() if dtype not in DTYPES)
    if other:
        raise ValueError(
            f"{folder / files[other[0]]} has '{other[0]}' of type {tensors[other[0]][0]}; give the folder of weights "
            "that are not quantized"
        )
    model = HuggingFaceFolder(
        path=folder,
        config=config,
        files=files,
        dtypes={name: dtype for name, (dtype, _) in tensors.items()},
        shapes={name: shape for name, (_, shape) in tensors.items()},
        has_chat_template=has_chat_template,
        names=_text_names(folder, tensors) if has_pictures else {},
    )
    if model.has_scalar_head and list(model.shapes.get(SCORE, ())) != [1, config.get("hidden_size")]:
        raise ValueError(
            f"{folder} has '{SCORE}' of shape {model.shapes.get(SCORE)}; a scalar head has one row of the hidden size"
        )
    return model


def with_folder(content: dict[Any, Any], model: dict[Any, Any], path: str) -> tuple[dict[Any, Any], list[str]]:
    """Return a recipe's content with the settings of ``model.hf``, and the contradictions; raises as ``read``."""
    folder = HuggingFaceFolder.read(path)
    faults: list[str] = []
    if folder.sizes.keys() | _OF_CHECKPOINTS <= model.keys():
        # A checkpoint's recipe, which is written with all defaults.
        other = {key: size for key, size in folder.sizes.items() if model[key] != size}
        faults = [f"model.{key}={model[key]}, but {folder.path / CONFIG} has {size}" for key, size in other.items()]
        model = _split({key: value for key, value in model.items() if key in _OF_RECIPE})[0]
    kept, decided = _split(model)
    faults += [f"model.{key} is set, but model.hf={path} decides it; set only one of them" for key in decided]
    filled, data = {**content, "model": kept | folder.sizes}, content.get("data")
    if isinstance(data, dict):
        filled["data"] = {"tokenizer": path} | data if folder.has_chat_template else data
        if isinstance(data.get("tokenizer"), str):
            faults += collect_faults([lambda: _check_tokenizer(folder, data["tokenizer"])])
    return filled, faults


def _split(model: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """Return the settings that a recipe may have with a folder, and the keys of those that the folder decides."""
    kept = {key: value for key, value in model.items() if key in ("transformer", "lora") or _is_of_run(str(key))}
    decided = [str(key) for key in model if key not in kept]
    further = model.get("transformer")
    if isinstance(further, dict):
        kept["transformer"] = {key: value for key, value in further.items() if _is_of_run(f"transformer.{key}")}
        decided += [f"transformer.{key}" for key in further if key not in kept["transformer"]]
    return kept, decided


def _is_of_run(key: str) -> bool:
    if key in ("transformer.mtp_num_layers", "transformer.mtp_detach_heads"):  # whether and how to train depths
        return True
    return SAME_FUNCTION.fullmatch(key) is not None and key != "max_position_embeddings"  # a limit of positions


def _check_tokenizer(folder: HuggingFaceFolder, path: str) -> None:
    """Reject another tokenizer whose vocabulary differs: its tokens would be read as the model's."""
    other = Path(local_path(path))
    mine, its = (place / _TOKENIZER for place in (folder.path, other))
    if not mine.is_file() or not its.is_file() or mine.samefile(its):
        return
    if _vocabulary(mine) != _vocabulary(its):
        raise ValueError(f"data.tokenizer={other} has another vocabulary than the model's own, {mine}")


def _vocabulary(file: Path) -> Any:
    model = read_json(file).get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _text_names(folder: Path, tensors: Collection[str]) -> dict[str, str]:
    """Return the names of a text model's weights within a model of pictures and text; see HuggingFaceFolder."""
    prefixes = [name.removesuffix(_EMBEDDINGS) for name in tensors if name.endswith(f".{_EMBEDDINGS}")]
    if len(prefixes) != 1:
        raise ValueError(f"{folder} has {len(prefixes)} weights '{_EMBEDDINGS}'; a model of pictures and text has one")
    own = {name.removeprefix(prefixes[0]): name for name in tensors if name.startswith(prefixes[0])}
    # transformers 5.23 saves the layers of Kimi K2.5's text model under the name of its tower's.
    found = {f"model.{_BLOCKS.sub('layers.', short)}": name for short, name in own.items()}
    head = next((name for name in tensors if name.endswith(LM_HEAD)), None)
    return found if head is None else found | {LM_HEAD: head}


def _read_configs(folder: Path) -> tuple[dict[str, Any], bool, bool]:
    """Return the configuration of the model, and whether it has a tokenizer with a chat template, and pictures."""
    names = (CONFIG, _TOKENIZER_CONFIG, "generation_config.json")
    contents = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    config = contents[CONFIG]
    if (folder / _ADAPTER).is_file():
        raise ValueError(
            f"{folder} has {_ADAPTER}: transformers adds an adapter to these weights; merge it into them, or remove it"
        )
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not str(architectures[0]).endswith((_LANGUAGE_MODEL, _CLASSIFIER, _WITH_PICTURES))
    ):
        raise ValueError(
            f"{folder / CONFIG} has architectures={architectures}; model.hf takes one, a causal language model such as "
            "LlamaForCausalLM or, with a scalar head, LlamaForSequenceClassification"
        )
    kind, has_pictures = _model_type(config), str(architectures[0]).endswith(_WITH_PICTURES)
    if kind not in (TEXT_MODELS if has_pictures else COMPARED):
        raise ValueError(
            f"{folder / CONFIG} has model_type={kind}, an architecture whose results were never compared with "
            f"transformers'; model.hf takes {', '.join([*COMPARED, *RENAMED, *TEXT_MODELS])}"
        )
    if _CODE in config and is_first_rank():
        says = "%s has '%s': the folder's code is ignored, and the model is transformers' own %s"
        logger.warning(says, folder / CONFIG, _CODE, kind)
    if has_pictures:
        expected, family, architecture = TEXT_MODELS[kind]
        text = config.get("text_config", {"model_type": expected})  # older folders have it beside the other settings
        if not isinstance(text, dict) or _model_type(text) != expected:
            raise ValueError(f"{folder / CONFIG} has another 'text_config' than one of model_type={expected}")
        config = {**config, **text, "architectures": [architecture], "model_type": family}
    elif config["model_type"] in RENAMED:
        config = {**config, "architectures": [RENAMED[config["model_type"]][1]], "model_type": kind}
    if "quantization_config" in config:
        raise ValueError(f"{folder / CONFIG} has 'quantization_config'; give the folder of the weights before that")
    layers = config.get(_LAYER_KINDS, config.get(_PATTERN))
    if isinstance(layers, list | str):
        config = {**config, SIZES["num_layers"]: len(layers)}
    is_apart = _TOKENIZER_CONFIG in contents and (folder / "chat_template.jinja").is_file()
    return config, is_apart or "chat_template" in contents.get(_TOKENIZER_CONFIG, {}), has_pictures


def _model_type(config: Mapping[str, Any]) -> str:
    """Return transformers' name of a configuration's model."""
    given = str(config.get("model_type"))
    return RENAMED[given][0] if given in RENAMED else given


def _without_head(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != LM_HEAD}


def _placed_weights(folder: Path) -> dict[str, str] | None:
    """Return the file of each weight as the index says; None if one file holds all."""
    is_indexed, is_single = ((folder / name).is_file() for name in (INDEX, SINGLE))
    if is_indexed and is_single:
        raise ValueError(
            f"{folder} has weights twice: transformers reads {SINGLE}, other programs the files of {INDEX}; remove "
            "those that are not the model's"
        )
    if is_single:
        return None
    if not is_indexed:
        pickles = sorted(one.name for one in folder.iterdir() if one.suffix in PICKLES)
        why = (
            f"its weights are pickles ({pickles[0]}), which can run code when they are opened; convert them to "
            "safetensors with save_pretrained, on a machine that may run untrusted code"
            if pickles
            else f"it has neither {SINGLE} nor {INDEX}"
        )
        raise ValueError(f"{folder} holds no safetensors: {why}")
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{folder / INDEX} has no 'weight_map'")
    for name, file in placed.items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX} places '{name}' in {file!r}, which is no safetensors file next to it")
    return placed


def tensors_in(file: Path) -> dict[str, tuple[str, Sequence[int]]]:
    """Return type and shape of each tensor in a complete safetensors file; raises ValueError, which names any other."""
    from safetensors import safe_open

    if not file.is_file():
        raise ValueError(f"{file} is missing; download the folder again")
    with damage_as(f"{file} is not a safetensors file, was cut off or is damaged; download it again"):
        with safe_open(file, "np") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
        found = {name: (str(one.get_dtype()), one.get_shape()) for name, one in tensors.items()}
        if not found:
            raise ValueError(file)
        return found


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object; raises ValueError, which names the file, for other content, or OSError."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content
