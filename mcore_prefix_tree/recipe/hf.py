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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_prefix_tree.inputs import read_text

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Keys of a model that leave its function as it is, up to rounding: how it is computed, initialised and regularised.
SAME_FUNCTION = re.compile(
    "hf|dtype|transformer_impl|max_position_embeddings"
    "|transformer\\.(.*(recompute|fus|overlap|dispatcher|grouped_gemm|offload|deterministic|init|loss|dropout).*)"
)
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


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """A folder of a causal language model.

    Attributes:
        path: of the folder.
        config: content of ``config.json``.
        files: for each weight, the name of its file.
        dtypes: for each weight, its type as safetensors names it, such as ``BF16``.
        shapes: for each weight, its shape.
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
        folder = Path(path)
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"{folder} is not a folder with a {CONFIG}; download the model first and give its local folder"
            )
        config = _json(folder / CONFIG)
        _check_config(folder, config)
        files = dict(_files(folder))
        headers = {file: _header(folder / file) for file in sorted(set(files.values()))}
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
        return cls(
            path=folder,
            config=config,
            files=files,
            dtypes={name: dtype for name, (dtype, _) in tensors.items()},
            shapes={name: shape for name, (_, shape) in tensors.items()},
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder holds a tokenizer with a chat template."""
        settings = self.path / "tokenizer_config.json"
        if not settings.is_file():
            return False
        return (self.path / "chat_template.jinja").is_file() or "chat_template" in _json(settings)

    @property
    def sizes(self) -> dict[str, int]:
        """Keys of a recipe's model that the configuration decides.

        Raises:
            ValueError: the configuration lacks one.
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
    further = model.get("transformer")
    given = [*map(str, model), *(f"transformer.{name}" for name in (further if isinstance(further, dict) else ()))]
    for key in given:
        # The folder's, and not of this run: a limit of positions, too.
        if key != "transformer" and (not SAME_FUNCTION.fullmatch(key) or key == "max_position_embeddings"):
            raise ValueError(f"model.{key} is set, but model.hf={path} decides it; leave one of them out")
    folder = HuggingFaceFolder.read(path)
    filled = {**content, "model": model | folder.sizes}
    data = content.get("data")
    if isinstance(data, dict) and folder.has_chat_template:
        filled["data"] = {"tokenizer": path} | data
    return filled


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    for name in (CONFIG, "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file() and _RUNS_CODE in _json(folder / name):
            raise ValueError(
                f"{folder / name} has '{_RUNS_CODE}': this model comes with code of its own, which is never run; use a "
                "version of the model that transformers itself implements"
            )
    if "quantization_config" in config:
        raise ValueError(f"{folder / CONFIG} has 'quantization_config'; give the folder of the weights before that")
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not str(architectures[0]).endswith("ForCausalLM")
    ):
        raise ValueError(
            f"{folder / CONFIG} has architectures={architectures}; model.hf takes one, a causal language model such as "
            "LlamaForCausalLM"
        )


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Weights and their files."""
    if (folder / INDEX).is_file() and (folder / SINGLE).is_file():
        raise ValueError(
            f"{folder} has weights twice: transformers reads {SINGLE}, other programs the files of {INDEX}; remove "
            "those that are not the model's"
        )
    if (folder / INDEX).is_file():
        placed = _json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ValueError(f"{folder / INDEX} has no 'weight_map'")
        for name, file in placed.items():
            if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
                raise ValueError(
                    f"{folder / INDEX} places '{name}' in {file!r}, which is not a safetensors file beside it"
                )
            yield name, file
    elif (folder / SINGLE).is_file():
        yield from dict.fromkeys(_header(folder / SINGLE), SINGLE).items()
    else:
        pickles = sorted(one.name for one in folder.iterdir() if one.suffix in PICKLES)
        why = (
            f"its weights are pickles ({pickles[0]}), which can run code when they are opened; convert them to "
            "safetensors with save_pretrained, on a machine where that does not matter"
            if pickles
            else f"it has neither {SINGLE} nor {INDEX}"
        )
        raise ValueError(f"{folder} holds no safetensors: {why}")


def _header(file: Path) -> dict[str, tuple[str, Sequence[int]]]:
    """Return type and shape of each tensor in a safetensors file whose length agrees with its header."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; download the folder again")
    size = file.stat().st_size
    with file.open("rb") as stream:
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


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content
