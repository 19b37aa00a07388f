"""Loader of recipes from a YAML file and ``key=value`` overrides; errors name the key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticError

from mcore_prefix_tree.recipe.adapter import AdapterFolder, layers_with, with_adapter
from mcore_prefix_tree.recipe.hf import SIZES, HuggingFaceFolder, with_folder
from mcore_prefix_tree.recipe.keys import instead_of
from mcore_prefix_tree.recipe.model import ModelConfig
from mcore_prefix_tree.recipe.parse import one_line, parse_recipe, short
from mcore_prefix_tree.recipe.rules import AT_ODDS, Check, broken_rules, collect_faults, keep_valid
from mcore_prefix_tree.recipe.sections import Recipe, RecipeError
from mcore_prefix_tree.recipe.values import NOT_LOCAL

# What a command checks of a recipe, see check.py.
Checks = Callable[[Recipe], Iterable[Check]]


def load_recipe(path: str | Path, overrides: Sequence[str] = (), checks: Checks = lambda recipe: ()) -> Recipe:
    """Read a recipe.

    Args:
        path: path of a YAML file. ``data.path`` in the file is relative to the working directory, like an override.
        overrides: ``key=value``, with dots for nesting (``data.path=rollouts.jsonl``); values are YAML.
        checks: function that returns further checks of the recipe, those of a command.

    Raises:
        RecipeError: the recipe cannot be used; names the file and the key of each mistake: first invalid values, then
            contradictions, then files.
    """
    content, faults, unread = parse_recipe(str(path), overrides)
    contradictions: list[str] = []
    of_files: list[str] = []
    for setting, fill in (("model.hf", with_folder), ("model.adapter", with_adapter)):
        content = _fill_in(setting, fill, content, contradictions, of_files)
    if of_files:
        unread |= {f"model.{key}" for key in SIZES}
    recipe, invalid = _validate(content, unread)
    own = invalid + contradictions + broken_rules(recipe)
    of_command = collect_faults(checks(recipe))
    if not of_files:
        of_files = collect_faults([lambda: _check_head(recipe), lambda: _check_adapter(recipe.model)])
    found = list(dict.fromkeys(own + of_command + of_files))
    if found:
        faults.append((f"recipe {path}: " if own or of_files else "") + "; ".join(found))
    if faults:
        raise RecipeError("; ".join(faults))
    return recipe


def _fill_in(
    setting: str,
    fill: Callable[[Any], tuple[Any, list[str]]],
    content: Any,
    contradictions: list[str],
    unreadable: list[str],
) -> Any:
    """Return the content with what a folder decides; note what contradicts it, or that it cannot be read."""
    try:
        content, faults = fill(content)
    except (OSError, ValueError) as error:
        unreadable.append(f"{setting}: {one_line(error)}")
    else:
        contradictions += [f"{setting}: {fault}" for fault in faults]
    return content


def _validate(content: Any, unread: Collection[str]) -> tuple[Recipe, list[str]]:
    """Return a recipe, without its invalid keys, and what is wrong with them; ``unread`` are known to be."""
    try:
        return TypeAdapter(Recipe).validate_python(content), []
    except PydanticError as error:
        sentences = []
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"] if part not in ("str", "list[str]")) or "the recipe"
            if fault["type"] == AT_ODDS or key in unread:  # rules are asked of what is valid
                continue
            value = "" if fault["type"] in ("missing", NOT_LOCAL) else f" (given {short(_repr(fault['input']))})"
            if fault["type"] == "unexpected_keyword_argument":
                sentences.append(f"{key}: there is no such key{value}, {instead_of(key, Recipe)}")
            else:
                sentences.append(f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]}{value}")
        return keep_valid(Recipe, content), sentences


def _check_head(recipe: Recipe) -> None:
    hf, objective = recipe.model.hf, recipe.objective
    if hf is not None and not objective.has_scalar_head and HuggingFaceFolder.read(hf).has_scalar_head:
        raise RecipeError(
            f"model.hf={hf} ends in a scalar head, and objective.name={objective.name} needs a vocabulary; give a "
            "language model"
        )


def _check_adapter(model: ModelConfig) -> None:
    if model.hf is None or model.lora is None:
        return
    folder = HuggingFaceFolder.read(model.hf)
    try:
        layers_with(folder, model.lora)
        if model.adapter is not None:
            AdapterFolder.read(model.adapter).check_fits(folder)
    except ValueError as error:
        raise RecipeError(f"model.lora: {one_line(error)}") from error


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge integer"
