"""From a YAML file and ``key=value`` overrides to a recipe.

Unknown keys, wrong types and values out of range are refused by the name of the key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticError
from yaml import YAMLError

from mcore_prefix_tree.recipe.keys import instead_of
from mcore_prefix_tree.recipe.sections import AT_ODDS, Recipe, RecipeError


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: of a YAML file. ``data.path`` in the file is relative to the working directory, like an override.
        overrides: ``key=value``, with dots for nesting (``data.path=rollouts.jsonl``); values are YAML.

    Raises:
        RecipeError: names the file and the key.
    """
    try:
        merged = OmegaConf.load(path)
        if not isinstance(merged, DictConfig):
            raise RecipeError(f"recipe {path} is a list; it must map keys to values")
        for override in overrides:
            merged = _with_override(merged, override)
        content = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except FileNotFoundError:
        raise RecipeError(f"recipe {path} does not exist") from None
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"recipe {path} cannot be read: {_one_line(error)}") from error
    try:
        return TypeAdapter(Recipe).validate_python(content)
    except PydanticError as error:
        faults = []
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"] if part not in ("str", "list[str]")) or "the recipe"
            given = "" if fault["type"] in ("missing", AT_ODDS) else f" (given {fault['input']!r})"
            if fault["type"] == "unexpected_keyword_argument":
                faults.append(f"{key}: there is no such key{given}, {instead_of(key, Recipe)}")
            else:
                faults.append(f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]}{given}")
        raise RecipeError(f"recipe {path}: " + "; ".join(faults)) from None


def _with_override(recipe: Any, override: str) -> Any:
    if "=" not in override:
        raise RecipeError(f"{override!r} is not an override; write key=value, for example train_iters=10")
    key, _, value = override.partition("=")
    try:
        # Standard input, which YAML reads as a list of nothing; and globs, which it takes for a name or a mapping.
        if value == "-" or (value.startswith(("*", "{")) and not _is_yaml(value)):
            override = f"{key}={json.dumps(value)}"
        return OmegaConf.merge(recipe, OmegaConf.from_dotlist([override]))
    except (OmegaConfBaseException, YAMLError, TypeError) as error:  # TypeError: a list where the recipe has a mapping
        raise RecipeError(f"override {override!r}: {_one_line(error)}") from error


def _is_yaml(value: str) -> bool:
    try:
        yaml.safe_load(value)
    except YAMLError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
