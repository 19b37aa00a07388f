"""Weights of Hugging Face folders that cannot be read, or have other shapes: every rank of a job ends with the reason.

Megatron-Bridge loads with collectives in the middle. A rank that stopped there would leave the others waiting.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, cast

import torch

from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

# Types by the names that safetensors gives them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def check_shapes(folder: HuggingFaceFolder, config: Any) -> None:
    """Check the shapes of a folder's weights against transformers' model of its configuration.

    Every rank checks all weights. While they load, only the first of tensor-parallel ranks would notice.

    Raises:
        RecipeError: a weight has another shape; the message names it. Weights that transformers keeps under other
            names, for example those of experts, are not checked.
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
    """Source of weights for Megatron-Bridge that gives NaN for a weight it cannot read.

    Attributes:
        failure: first file of this rank that cannot be read, and the reason; None if all can.
    """

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
        """Return the names that a model of text alone has for the weights."""
        return sorted(self._names)

    def has_glob(self, pattern: str) -> bool:
        """Return whether a name fits a pattern."""
        return any(fnmatch(name, pattern) for name in self._names)

    def load_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return weights by name."""
        found = self._source.load_tensors([self._names[name] for name in names])
        return {name: found[self._names[name]] for name in names}
