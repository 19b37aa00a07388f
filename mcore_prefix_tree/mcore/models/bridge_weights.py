"""Weights of Hugging Face folders that a model does not read, cannot read, or that have other shapes.

Megatron-Bridge loads with collectives in the middle. A rank that stopped there would leave the others waiting, so every
rank of a job ends with the reason.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
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
_EMBEDDINGS = "model.embed_tokens.weight"
_COPIES = {".embed_tokens.weight": _EMBEDDINGS, ".shared_head.head.weight": LM_HEAD}
# Rows of two weights that are compared at a time, in place of both weights.
_ROWS = 4096
# Buffers that older releases of transformers wrote; they follow from the configuration.
_BUFFER = "rotary_emb.inv_freq"


def check_weights(folder: HuggingFaceFolder, config: Any, read: set[str], replaced: set[str]) -> None:
    """Check that transformers' model of a folder has the weights ``read`` and no other; raise RecipeError.

    ``config`` is transformers' for the compared family; ``replaced`` are weights of it that the model lacks. Every rank
    checks all weights. While they load, only the first of tensor-parallel ranks would notice another shape.
    """
    built = {name for name in folder.files if not is_untrained(folder, name, has_depths=False)}
    taken, report = _taken(folder, config, read & built)
    found = f"model.hf={folder.path}: its weights do not fit its config.json:"
    for name, shape, expected in sorted(report["mismatched_keys"]):
        raise RecipeError(f"{found} '{name}' has shape {list(shape)} instead of {list(expected)}")
    for name in sorted(report["unexpected_keys"]):
        raise RecipeError(f"{found} transformers' model does not read '{name}', and Megatron-Bridge's does")
    others = _taken(folder, config, folder.files.keys() - read)[0] - replaced
    for name in sorted(others & taken if folder.names else others):
        raise RecipeError(f"{found} transformers' model reads '{name}' from a weight that Megatron-Bridge's does not")
    for name in () if folder.names else sorted(report["missing_keys"] - replaced):
        raise RecipeError(f"model.hf={folder.path} lacks '{name}' of transformers' model; download it again")


def _taken(folder: HuggingFaceFolder, config: Any, names: Collection[str]) -> tuple[set[str], dict[str, Any]]:
    """Return the weights of transformers' model that it takes from some of a folder's, and its report."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
    from transformers.utils import logging as printed

    kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if folder.names else MODEL_FOR_CAUSAL_LM_MAPPING
    whole = AutoConfig.from_pretrained(folder.path, trust_remote_code=False) if folder.names else config
    before, shows_progress = logging.root.manager.disable, printed.is_progress_bar_enabled()
    logging.disable(logging.WARNING)  # it prints its report
    printed.disable_progress_bar()
    try:
        model, report = kinds[type(whole)].from_pretrained(
            None,
            config=copy.deepcopy(whole),  # it is given a name
            state_dict={name: torch.empty(list(folder.shapes[name]), device="meta") for name in names},
            device_map="meta",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise RecipeError(f"model.hf={folder.path}: its weights do not fit its config.json: {error}") from error
    finally:
        logging.disable(before)
        if shows_progress:
            printed.enable_progress_bar()
    return model.state_dict().keys() - report["missing_keys"], report


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


def unread_weights(folder: HuggingFaceFolder, copies: Collection[str], has_depths: bool) -> set[str]:
    """Return the names of unused weights: those of depths that are not built, copies of others, and derived ones."""
    head = {SCORE} if folder.has_scalar_head else set()
    return {*copies, *head, *(name for name in folder.files if is_untrained(folder, name, has_depths))}


def copies_in(folder: HuggingFaceFolder, config: Any, has_depths: bool) -> dict[str, str]:
    """Return the names of weights that repeat others, and of these: of a tied output layer, and of depths."""
    head, embeddings = (folder.names.get(name, name) for name in (LM_HEAD, _EMBEDDINGS))
    is_tied = getattr(config, "tie_word_embeddings", False) and {head, embeddings} <= folder.files.keys()
    found = {head: embeddings} if is_tied else {}
    if not has_depths:
        return found
    return found | {
        name: own if own in folder.files.keys() - found.keys() else _EMBEDDINGS
        for name in folder.files
        for end, own in _COPIES.items()
        if name.endswith(end) and _is_deeper(folder, name)
    }


def check_copies(folder: HuggingFaceFolder, copies: Mapping[str, str]) -> None:
    """Reject a copy that differs, of a weight that the model has once, as RecipeError."""
    from safetensors import safe_open

    for pair in copies.items():
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(folder.path / folder.files[name], "pt")) for name in pair]
            own, other = (file.get_slice(name) for file, name in zip(opened, pair, strict=True))
            is_same = own.get_shape() == other.get_shape() and all(
                torch.equal(*(one[at : at + _ROWS].double() for one in (own, other)))
                for at in range(0, own.get_shape()[0], _ROWS)
            )
        if not is_same:
            is_depth = _is_deeper(folder, pair[0])
            raise RecipeError(
                f"model.hf={folder.path}: '{pair[0]}' differs from '{pair[1]}', "
                + (
                    "which Megatron-Core's depths of multi-token prediction share; remove "
                    "model.transformer.mtp_num_layers"
                    if is_depth
                    else "and transformers ties only equal ones; set tie_word_embeddings to false in config.json"
                )
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
