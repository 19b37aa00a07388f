"""Weights of Hugging Face folders that a model does not read, cannot read, or that have other shapes.

Megatron-Bridge loads with collectives in the middle. A rank that stopped there would leave the others waiting, so every
rank of a job ends with the reason.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Any, cast

import torch

from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.settings.hf_folder import LM_HEAD, SCORE, HuggingFaceFolder

# Types by the names that safetensors gives them.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_DEPTHS = re.compile(r"(model\.)?mtp(_layers)?\.")
# What a depth has a copy of, by the end of the copy's name: Megatron-Core's depths share it with the model.
_COPIES = {".embed_tokens.weight": "model.embed_tokens.weight", ".shared_head.head.weight": LM_HEAD}
# Buffers that older releases of transformers wrote; they follow from the configuration.
_BUFFER = "rotary_emb.inv_freq"


def check_shapes(folder: HuggingFaceFolder, config: Any) -> None:
    """Check the shapes of a folder's weights against transformers' model of its configuration; raise RecipeError.

    Every rank checks all weights. While they load, only the first of tensor-parallel ranks would notice. Weights that
    transformers keeps under other names, for example those of experts, are not checked.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    # Under the emulation of a GPU a device context does not reach torch's factories.
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for name, weight in model.state_dict().items():
        stored = folder.names.get(name, name)
        if stored not in folder.shapes:
            stored = stored.replace("model.", "backbone.", 1)  # Nemotron-H's files have another name than its class
        found, expected = list(folder.shapes.get(stored, weight.shape)), list(weight.shape)
        if found != expected:
            raise RecipeError(
                f"model.hf={folder.path}: its weights do not fit its config.json: '{name}' has shape {found} instead "
                f"of {expected}"
            )


class KeepsFailure:
    """Source of weights for Megatron-Bridge that gives NaN for one it cannot read; ``failure`` says which, and why."""

    def __init__(self, folder: HuggingFaceFolder, source: Any) -> None:
        self._folder, self._source = folder, source
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def load_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return weights by name, on the CPU, of the types and shapes that their files' headers have."""
        try:
            return cast("dict[str, torch.Tensor]", self._source.load_tensors(names))
        except Exception as error:  # safetensors has its own exception for damage
            stored = {name: self._folder.names.get(name, name) for name in names}
            file = self._folder.path / self._folder.files[stored[names[0]]]
            self.failure = self.failure or f"{file} cannot be read: {error}"
            shapes, dtypes = self._folder.shapes, self._folder.dtypes
            return {
                name: torch.full(list(shapes[one]), torch.nan, dtype=DTYPES[dtypes[one]])
                for name, one in stored.items()
            }


class TextWeights:
    """Source for Megatron-Bridge of the text model's weights in a folder of a model of pictures and text."""

    def __init__(self, folder: HuggingFaceFolder, source: Any) -> None:
        self._names, self._source = folder.names, source

    def get_all_keys(self) -> list[str]:
        return sorted(self._names)

    def has_glob(self, pattern: str) -> bool:
        return any(fnmatch(name, pattern) for name in self._names)

    def load_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        found = self._source.load_tensors([self._names[name] for name in names])
        return {name: found[self._names[name]] for name in names}


def unread_weights(folder: HuggingFaceFolder, has_depths: bool) -> set[str]:
    """Return the names of unused weights: those of depths that are not built, copies in others, and derived ones."""
    tied = {folder.names.get(LM_HEAD, LM_HEAD)} if folder.config.get("tie_word_embeddings") else set()
    head = {SCORE} if folder.has_scalar_head else set()
    copies = copies_in_depths(folder).keys() if has_depths else set()
    return tied | head | copies | {name for name in folder.files if is_untrained(folder, name, has_depths)}


def copies_in_depths(folder: HuggingFaceFolder) -> dict[str, str]:
    """Return the names of weights that depths repeat, and the names of the model's own."""
    return {
        name: own if own in folder.files else _COPIES[".embed_tokens.weight"]
        for name in folder.files
        for end, own in _COPIES.items()
        if name.endswith(end) and _is_deeper(folder, name)
    }


def check_copies(folder: HuggingFaceFolder) -> None:
    """Reject a depth with another embedding or output layer than the model, which Megatron-Core's depths share."""
    from safetensors import safe_open

    for pair in copies_in_depths(folder).items():
        weights = []
        for name in pair:
            with safe_open(folder.path / folder.files[name], "pt") as opened:
                weights.append(opened.get_tensor(name))
        if not torch.equal(*weights):
            raise RecipeError(
                f"model.hf={folder.path}: '{pair[0]}' differs from '{pair[1]}', which Megatron-Core's depths of "
                "multi-token prediction share; remove model.transformer.mtp_num_layers"
            )


def _is_deeper(folder: HuggingFaceFolder, name: str) -> bool:
    """Return whether a weight is of a layer behind the last, which predicts further tokens."""
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= folder.config["num_hidden_layers"]


def is_untrained(folder: HuggingFaceFolder, name: str, has_depths: bool) -> bool:
    """Return whether training does not change a weight: a picture's, a rotary table, a depth that is not built."""
    if folder.names and name not in folder.names.values():
        return True
    is_depth = _is_deeper(folder, name) or _DEPTHS.match(name) is not None
    return _BUFFER in name or (is_depth and not has_depths)
