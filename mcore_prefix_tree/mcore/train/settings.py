"""The recipe that a checkpoint was written with, beside it: a resumed run says what it does otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mcore_prefix_tree.recipe import Recipe

FILE = "recipe.yaml"
# What changes nothing of the training itself.
_ASIDE = ("checkpoint", "validation", "log", "verify", "compare")


def write_settings(folder: Path, recipe: Recipe) -> None:
    """Write a recipe with all its defaults into a checkpoint's folder."""
    OmegaConf.save(OmegaConf.create(asdict(recipe)), folder / FILE)


def changed_settings(folder: Path, recipe: Recipe) -> list[str]:
    """What a recipe has otherwise than the one in a checkpoint's folder, ``key before -> now``; none if it has none."""
    if not (folder / FILE).exists():
        return []
    written: Any = OmegaConf.to_container(OmegaConf.load(folder / FILE))
    before, now = dict(_flat(written)), dict(_flat(asdict(recipe)))
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in dict.fromkeys([*now, *before])
        if key.split(".")[0] not in _ASIDE and before.get(key) != now.get(key)
    ]


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
