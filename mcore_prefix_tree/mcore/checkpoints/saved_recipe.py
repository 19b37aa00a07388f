"""The recipe that a checkpoint was written with, in a file of its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig
from omegaconf import OmegaConf

from mcore_prefix_tree.plan.model_shape import PIPE
from mcore_prefix_tree.settings import ModelConfig, RecipeError
from mcore_prefix_tree.settings.hf_folder import SAME_FUNCTION

FILE = "recipe.yaml"
# Sections that do not change training itself.
_ASIDE = ("checkpoint", "validation", "log", "verify", "compare")


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write a recipe with all its defaults into a checkpoint's folder."""
    OmegaConf.save(OmegaConf.create(dict(settings)), folder / FILE)


def changed_settings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ from those saved in a folder, as ``key before -> now``; empty without any."""
    written = _read(folder)
    if written is None:
        return []
    before, now = dict(_flat(written)), dict(_flat(settings))
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in dict.fromkeys([*now, *before])
        if key.split(".")[0] not in _ASIDE and before.get(key) != now.get(key)
    ]


def check_same_function(folder: Path, model: ModelConfig) -> None:
    """Check that weights serve the model that they were trained as.

    Weights of one shape serve models that compute different functions: another rotary base, epsilon or softmax scale
    changes every log-probability. A folder without a recipe, for example Megatron-LM's, is not compared. Raises
    RecipeError, with both values, for the first key that differs.
    """
    written = (_read(folder) or {}).get("model")
    if not isinstance(written, Mapping):
        return
    before, now = _with_defaults(written), _with_defaults(dataclasses.asdict(model))
    for key in dict.fromkeys([*now, *before]):
        # A size that is left to Megatron; weights of other shapes are rejected when they are read.
        is_open = "." not in key and (before.get(key) is None or now.get(key) is None)
        if not is_open and before.get(key) != now.get(key) and not SAME_FUNCTION.fullmatch(key):
            raise RecipeError(
                f"the weights in {folder} were trained with model.{key}={before.get(key)}, and this recipe has "
                f"{now.get(key)}; set model.{key}={before.get(key)}, or remove "
                f"{folder / FILE} if this is intended"
            )


def _read(folder: Path) -> Mapping[str, Any] | None:
    """Return the recipe in a checkpoint's folder. It informs; a run does not depend on it."""
    try:
        written: Any = OmegaConf.to_container(OmegaConf.load(folder / FILE), resolve=False)
    except Exception:  # missing, damaged, or not YAML
        return None
    return written if isinstance(written, Mapping) else None


def _with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's settings by dotted key; fields of Megatron's that neither names have Megatron's default."""
    fields = dataclasses.fields(MLATransformerConfig)
    defaults = {
        f"transformer.{field.name}": field.default for field in fields if field.default is not dataclasses.MISSING
    }
    settings = defaults | dict(_flat(model))
    pattern = settings.get("hybrid_layer_pattern")
    if isinstance(pattern, str):
        settings["hybrid_layer_pattern"] = pattern.replace(PIPE, "")  # stages are a layout of the same model
    return settings


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
