"""Hugging Face model folders: what a recipe takes from one, and which folders are rejected.

Only JSON and the headers of safetensors files are read here, in milliseconds; nothing that a folder holds is executed.
A safetensors file begins with the length of its header in 8 bytes, little-endian, and the header, JSON
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_prefix_tree.inputs import check_files_of, local_path, open_regular, read_text

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Keys of a model that leave its function as it is, up to rounding: how it is computed, initialised and regularised.
SAME_FUNCTION = re.compile(
    "hf|adapter|dtype|transformer_impl|max_position_embeddings"
    "|transformer\\.(.*(recompute|fus|overlap|dispatcher|grouped_gemm|offload|deterministic|init|loss|dropout).*)"
)
_OF_RECIPE = ("hf", "dtype", "transformer_impl", "lora", "adapter")
# Keys that a recipe in a checkpoint has, which is written with all defaults.
_OF_CHECKPOINTS = {"rotary_base", "swiglu", "qk_layernorm"}
_LONGEST_HEADER = 100_000_000  # of the format
# Keys of a recipe's model by the names that configurations have for them.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_RUNS_CODE = "auto_map"
_ADAPTER = "adapter_config.json"
_TOKENIZER = "tokenizer.json"
# Keys of a configuration that the function of its model does not depend on.
_NOT_OF_THE_MODEL = (
    "_name_or_path",
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


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """A folder of a causal language model, or of one that ends in a scalar head.

    Attributes:
        path: path of the folder.
        config: content of ``config.json``.
        files: file name of each weight.
        dtypes: type of each weight as safetensors names it, such as ``BF16``.
        shapes: shape of each weight.
    """

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Sequence[int]]

    @classmethod
    def read(cls, path: str | Path) -> HuggingFaceFolder:
        """Read a folder's configuration and the headers of its weights.

        Raises:
            ValueError: the folder is missing, incomplete or truncated, holds code, pickles or quantized weights, or its
                model is not a causal language model; names the file.
            OSError: a file cannot be read.
        """
        folder = Path(local_path(str(path)))
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"{folder} is not a folder with a {CONFIG}; download the model first and give its local folder"
            )
        check_files_of(folder)
        config = read_json(folder / CONFIG)
        _check_config(folder, config)
        files = dict(_files(folder))
        headers = {file: tensors_in(folder / file) for file in sorted(set(files.values()))}
        tensors = {name: headers[file][name] for name, file in files.items() if name in headers[file]}
        absent = sorted(files.keys() - tensors.keys())
        if absent:
            raise ValueError(f"{folder / files[absent[0]]} lacks '{absent[0]}', which {INDEX} places there")
        other = sorted(name for name, (dtype, _) in tensors.items() if dtype not in DTYPES)
        if other:
            raise ValueError(
                f"{folder / files[other[0]]} has '{other[0]}' of type {tensors[other[0]][0]}; give the folder of "
                "weights that are not quantized"
            )
        found = cls(
            path=folder,
            config=config,
            files=files,
            dtypes={name: dtype for name, (dtype, _) in tensors.items()},
            shapes={name: shape for name, (_, shape) in tensors.items()},
        )
        if found.has_scalar_head and list(found.shapes.get(SCORE, ())) != [1, config.get("hidden_size")]:
            raise ValueError(
                f"{folder} has '{SCORE}' of shape {found.shapes.get(SCORE)}; a scalar head has one row of the hidden "
                "size"
            )
        return found

    @property
    def architecture(self) -> str:
        """Name of the language model's class in transformers, whatever head this one ends in."""
        return str(self.config["architectures"][0]).removesuffix(_CLASSIFIER).removesuffix(_LANGUAGE_MODEL) + (
            _LANGUAGE_MODEL
        )

    @property
    def classifier(self) -> str:
        """Name of the class with a scalar head."""
        return self.architecture.removesuffix(_LANGUAGE_MODEL) + _CLASSIFIER

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
    def has_chat_template(self) -> bool:
        """Return whether the folder holds a tokenizer with a chat template."""
        settings = self.path / "tokenizer_config.json"
        if not settings.is_file():
            return False
        return (self.path / "chat_template.jinja").is_file() or "chat_template" in read_json(settings)

    @property
    def sizes(self) -> dict[str, int]:
        """Keys of a recipe's model that the configuration decides.

        Raises:
            ValueError: the configuration lacks a key.
        """
        for name in _SIZES.values():
            if name not in self.config:
                raise ValueError(f"{self.path / CONFIG} lacks '{name}'")
        return {key: self.config[name] for key, name in _SIZES.items()}


def with_folder(content: Any) -> Any:
    """Return the content of a recipe with what ``model.hf`` gives, if it is set.

    Args:
        content: parsed YAML, not validated yet.

    Raises:
        ValueError: see :meth:`HuggingFaceFolder.read`; or the recipe sets what the folder decides; names the key.
        OSError: a file cannot be read.
    """
    model = content.get("model") if isinstance(content, dict) else None
    path = model.get("hf") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(path, str):
        return content
    folder = HuggingFaceFolder.read(path)
    if folder.sizes.keys() | _OF_CHECKPOINTS <= model.keys():
        model = _as_given(model, folder)
    further = model.get("transformer")
    given = [*map(str, model), *(f"transformer.{name}" for name in (further if isinstance(further, dict) else ()))]
    for key in given:
        if key in ("transformer", "lora"):
            continue
        # The folder's, and not of this run: a limit of positions, too.
        if not SAME_FUNCTION.fullmatch(key) or key == "max_position_embeddings":
            raise ValueError(f"model.{key} is set, but model.hf={path} decides it; leave one of them out")
    filled = {**content, "model": model | folder.sizes}
    data = content.get("data")
    if isinstance(data, dict) and folder.has_chat_template:
        filled["data"] = {"tokenizer": path} | data
    if isinstance(data, dict) and isinstance(data.get("tokenizer"), str):
        _check_tokenizer(folder, Path(local_path(data["tokenizer"])))
    return filled


def _as_given(model: Mapping[str, Any], folder: HuggingFaceFolder) -> dict[str, Any]:
    """Return the keys that stay with a recipe, of one that a checkpoint wrote with what its folder decided."""
    for key, value in folder.sizes.items():
        if model[key] != value:
            raise ValueError(f"model.{key}={model[key]}, but {folder.path / CONFIG} has {value}")
    further = model.get("transformer")
    kept = {key: value for key, value in model.items() if key != "transformer" and key in _OF_RECIPE}
    if isinstance(further, dict):
        kept["transformer"] = {
            name: value for name, value in further.items() if SAME_FUNCTION.fullmatch(f"transformer.{name}")
        }
    return kept


def _check_tokenizer(folder: HuggingFaceFolder, other: Path) -> None:
    """Reject another tokenizer whose vocabulary differs: its tokens would be read as the model's."""
    mine, its = (place / _TOKENIZER for place in (folder.path, other))
    if not mine.is_file() or not its.is_file() or mine.samefile(its):
        return
    if _vocabulary(mine) != _vocabulary(its):
        raise ValueError(f"data.tokenizer={other} has another vocabulary than the model's own, {mine}")


def _vocabulary(file: Path) -> Any:
    model = read_json(file).get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    for name in (CONFIG, "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file() and _RUNS_CODE in read_json(folder / name):
            raise ValueError(
                f"{folder / name} has '{_RUNS_CODE}': this model comes with code of its own, which is never run; use a "
                "version of the model that transformers itself implements"
            )
    if (folder / _ADAPTER).is_file():
        raise ValueError(
            f"{folder} has {_ADAPTER}: transformers adds an adapter to these weights; merge it into them, or remove it"
        )
    if "quantization_config" in config:
        raise ValueError(f"{folder / CONFIG} has 'quantization_config'; give the folder of the weights before that")
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not str(architectures[0]).endswith((_LANGUAGE_MODEL, _CLASSIFIER))
    ):
        raise ValueError(
            f"{folder / CONFIG} has architectures={architectures}; model.hf takes one, a causal language model such as "
            "LlamaForCausalLM or, with a scalar head, LlamaForSequenceClassification"
        )


def _without_head(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != LM_HEAD}


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Weights and their files."""
    if (folder / INDEX).is_file() and (folder / SINGLE).is_file():
        raise ValueError(
            f"{folder} has weights twice: transformers reads {SINGLE}, other programs the files of {INDEX}; remove "
            "those that are not the model's"
        )
    if (folder / INDEX).is_file():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ValueError(f"{folder / INDEX} has no 'weight_map'")
        for name, file in placed.items():
            if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
                raise ValueError(
                    f"{folder / INDEX} places '{name}' in {file!r}, which is not a safetensors file beside it"
                )
            yield name, file
    elif (folder / SINGLE).is_file():
        yield from dict.fromkeys(tensors_in(folder / SINGLE), SINGLE).items()
    else:
        pickles = sorted(one.name for one in folder.iterdir() if one.suffix in PICKLES)
        why = (
            f"its weights are pickles ({pickles[0]}), which can run code when they are opened; convert them to "
            "safetensors with save_pretrained, on a machine where that does not matter"
            if pickles
            else f"it has neither {SINGLE} nor {INDEX}"
        )
        raise ValueError(f"{folder} holds no safetensors: {why}")


def tensors_in(file: Path) -> dict[str, tuple[str, Sequence[int]]]:
    """Return type and shape of each tensor in a safetensors file whose length agrees with its header.

    Raises:
        ValueError: the file is missing, or is something else or only a part of one; names it.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; download the folder again")
    size = file.stat().st_size
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= min(size - 8, _LONGEST_HEADER) else b""
    found: dict[str, tuple[str, Sequence[int]]]
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max(int(one["data_offsets"][1]) for one in header.values())
        found = {name: (str(one["dtype"]), list(one["shape"])) for name, one in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} is not a safetensors file, or was cut off; download it again") from None
    if 8 + length + end != size:
        raise ValueError(f"{file} has {size:,} bytes instead of {8 + length + end:,}; download it again")
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ValueError: the file holds something else; names it.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content
