"""Loader of recipes from a YAML file and ``key=value`` overrides; errors name the key."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticError
from yaml import YAMLError

from mcore_prefix_tree.settings.adapter_folder import AdapterFolder, layers_with, with_adapter
from mcore_prefix_tree.settings.hf_folder import SIZES, HuggingFaceFolder, with_folder
from mcore_prefix_tree.settings.model_section import ModelConfig
from mcore_prefix_tree.settings.section import AT_ODDS, NOT_LOCAL, broken_rules, collect_faults, keep_valid, suggest_key
from mcore_prefix_tree.settings.sections import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.utils.gone import explain_gone
from mcore_prefix_tree.utils.inputs import local_path, read_text
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

# Numbers that YAML 1.1 does not read as they look: 1:30 is 90, to base 60, and 010 is 8.
_MISLEADING = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
# OmegaConf takes it for a value that comes later, and ignores it in an override.
_MISSING = "???"
_Scanner: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one is slow on deep nesting
# How names of data end; JSON is YAML too.
_SAMPLES = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet", ".arrow", ".feather")
_Content = dict[Any, Any]
_Fill = Callable[[_Content, _Content, str], tuple[_Content, list[str]]]
_UNREADABLE = (OmegaConfBaseException, YAMLError, OSError, RecursionError, TypeError, ValueError)


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), checks: Iterable[Callable[[Recipe], object]] = ()
) -> Recipe:
    """Read a recipe.

    Args:
        path: path of a YAML file. ``data.path`` in the file is relative to the working directory, like an override.
        overrides: ``key=value``, with dots for nesting (``data.path=rollouts.jsonl``); values are YAML.
        checks: further checks of the recipe, those of a command (see command_checks.py).

    Raises:
        RecipeError: the recipe cannot be used; names the file and the key of each mistake: first invalid values, then
            contradictions, then files.
    """
    content, faults, unread = _parse(str(path), overrides)
    content, of_model, of_hf = _fill_in("hf", with_folder, content)
    if of_hf:
        unread |= {f"model.{key}" for key in SIZES}
    content, of_lora, of_adapter = _fill_in("adapter", with_adapter, content)
    recipe, own = _validate(content, unread)
    own += of_model + of_lora
    of_command = collect_faults(partial(check, recipe) for check in checks)
    of_files = of_hf + of_adapter or collect_faults(
        [
            lambda: _check_head(recipe.model, recipe.objective),
            lambda: _check_text_model(recipe.model, recipe.objective),
            lambda: _check_adapter(recipe.model),
        ]
    )
    own_name = f"recipe {path}: " if own or of_files else ""
    if own or of_command or of_files:
        faults.append(own_name + "; ".join(dict.fromkeys(own + of_command + of_files)))
    if faults:
        raise RecipeError("; ".join(faults))
    return recipe


def _fill_in(key: str, fill: _Fill, content: _Content) -> tuple[_Content, list[str], list[str]]:
    """Return the content with the settings of ``model``'s folder, the contradictions, and why it cannot be read."""
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(path := model.get(key), str):
        return content, [], []
    try:
        content, faults = fill(content, model, path)
    except (OSError, ValueError) as error:
        return content, [], [f"model.{key}: {_one_line(error)}"]
    return content, [f"model.{key}: {fault}" for fault in faults], []


def _validate(content: Any, unread: Collection[str]) -> tuple[Recipe, list[str]]:
    """Return a recipe without its invalid keys, of which ``unread`` are reported already, and the mistakes."""
    try:
        return TypeAdapter(Recipe).validate_python(content), []
    except PydanticError as error:
        sentences = []
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"] if part not in ("str", "list[str]")) or "the recipe"
            if fault["type"] == AT_ODDS or key in unread:  # rules apply to valid keys
                continue
            value = "" if fault["type"] in ("missing", NOT_LOCAL) else f" (given {_short(_repr(fault['input']))})"
            if fault["type"] == "unexpected_keyword_argument":
                way_out = explain_gone(key) or f"{key}: there is no such key{value}, {suggest_key(key, Recipe)}"
                sentences.append(way_out)
            else:
                sentences.append(f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]}{value}")
        recipe = keep_valid(Recipe, content)
        return recipe, sentences + broken_rules(recipe)


def _check_head(model: ModelConfig, objective: ObjectiveConfig) -> None:
    if model.hf is not None and not objective.has_scalar_head and HuggingFaceFolder.read(model.hf).has_scalar_head:
        raise RecipeError(
            f"model.hf={model.hf} ends in a scalar head, and objective.name={objective.name} needs a vocabulary; give "
            "a language model"
        )


def _check_text_model(model: ModelConfig, objective: ObjectiveConfig) -> None:
    if model.hf is None or not HuggingFaceFolder.read(model.hf).names:
        return
    other = "model.lora" if model.lora is not None else f"objective.name={objective.name}"
    if model.lora is not None or objective.has_scalar_head:
        raise RecipeError(
            f"model.hf={model.hf} is a model of pictures and text, whose text model is trained as a whole; {other} "
            "needs the folder of a model of text"
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
        raise RecipeError(f"model.lora: {_one_line(error)}") from error


def _parse(path: str, overrides: Sequence[str]) -> tuple[dict[Any, Any], list[str], set[str]]:
    """Return a recipe's content, sentences about parts that cannot be read, and the keys unknown for that reason."""
    merged = _read_file(path)
    changes: list[DictConfig] = []
    faults = collect_faults(partial(_override, merged, override, changes) for override in overrides)
    _notice_doubled(overrides)
    unread: set[str] = set()
    try:
        content = _resolve(path, merged, faults, unread)
        _replace_warmup(content, [OmegaConf.to_container(change, resolve=False) for change in changes])
    except _UNREADABLE as error:
        raise RecipeError("; ".join([*faults, f"recipe {path} cannot be read: {_one_line(error)}"])) from error
    return content, faults, unread


def _read_file(path: str) -> DictConfig:
    try:
        text = read_text(local_path(path))
        _check_scalars(text)
        content = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        way_out = "check the path, or copy the shipped recipes with mcore-prefix-tree recipes"
        raise RecipeError(f"recipe {path} does not exist; {way_out}") from None
    except _UNREADABLE as error:
        raise RecipeError(f"recipe {path} {_describe_fault(str(path), error)}") from error
    if not isinstance(content, DictConfig):
        raise RecipeError(f"recipe {path} is a list; it must map keys to values")
    return content


def _resolve(path: str, merged: DictConfig, faults: list[str], unread: set[str]) -> Any:
    """Return plain values, with null in place of references to unknown names."""
    try:
        return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = re.sub(r"\[(\d+)\]", r".\1", error.full_key or "")
        if not key or key in unread:
            raise
        faults.append(f"recipe {path} cannot be read: {_one_line(error)}")
        unread.add(key)
        OmegaConf.update(merged, key, None)
    return _resolve(path, merged, faults, unread)


def _notice_doubled(overrides: Sequence[str]) -> None:
    """Warn on the first rank of a key that is set twice: the last value counts, as a script that adds one may want."""
    given: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if given.setdefault(key, value) != value and is_first_rank():
            logger.warning("%s is set twice, to %s and to %s; the last counts", key, _short(given[key]), _short(value))
        given[key] = value


def _replace_warmup(content: dict[Any, Any], changes: Sequence[Any]) -> None:
    """Drop the file's warm-up if overrides set it by its other key: a command line need not unset what it replaces."""
    sections = [section for change in changes if isinstance(section := change.get("optimizer"), dict)]
    given = {key: value for section in sections for key, value in section.items()}
    steps, fraction = (given.get(key) is not None for key in ("lr_warmup_steps", "lr_warmup_fraction"))
    options = content.get("optimizer")
    if steps != fraction and isinstance(options, dict):
        options.pop("lr_warmup_fraction" if steps else "lr_warmup_steps", None)


def _override(recipe: DictConfig, override: str, changes: list[DictConfig]) -> None:
    """Change a recipe, which nobody else has, rather than copy all of it for each override; note the change."""
    if "=" not in override or not all(override.partition("=")[0].split(".")):
        raise RecipeError(f"{override!r} is not an override; write key=value, for example train_iters=10")
    key, _, value = override.partition("=")
    # Standard input, which YAML reads as a list of nothing; and globs, which it takes for a name or a mapping.
    if value == "-" or (value.startswith(("*", "{")) and not _is_yaml(value)):
        value = json.dumps(value)
    try:
        _check_scalars(value)
        change = OmegaConf.from_dotlist([f"{key}={value}"])
        OmegaConf.unsafe_merge(recipe, change)
    except UnicodeEncodeError:
        raise RecipeError(f"override {_short(override)!r} is not UTF-8; rename the file that it names") from None
    except _UNREADABLE as error:
        raise RecipeError(f"override {_short(override)!r}: {_one_line(error)}") from error
    changes.append(change)


def _check_scalars(text: str) -> None:
    """Reject scalars that YAML or OmegaConf would misread, by their line; raises ValueError, YAMLError for no YAML."""
    for token in yaml.scan(text, Loader=_Scanner):
        where = f"line {token.start_mark.line + 1}"
        if isinstance(token, yaml.TagToken):
            raise ValueError(f"{where} has a tag, {token.value[1]!r}; recipes hold plain values")
        if not isinstance(token, yaml.ScalarToken) or not token.plain:
            continue
        if token.value == _MISSING:
            raise ValueError(f"{where}: {_MISSING} stands for a value that is missing; give the value")
        if _MISLEADING.fullmatch(token.value):
            raise ValueError(
                f"{where}: YAML reads {token.value} as octal or to base 60; write a decimal number, or put a text in "
                "quotes"
            )


def _is_yaml(value: str) -> bool:
    try:
        yaml.safe_load(value)
    except YAMLError:
        return False
    return True


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge integer"


def _describe_fault(path: str, error: Exception) -> str:
    """Return why a file or folder is no recipe, and the way out."""
    if isinstance(error, IsADirectoryError):
        is_model = os.path.isfile(os.path.join(path, "config.json"))
        return f"is a folder; {'name a recipe, and this folder with --hf' if is_model else 'name a YAML file in it'}"
    if path.lower().endswith(_SAMPLES) and not isinstance(error, TimeoutError):  # of a FIFO without a writer
        return f"is a file of samples, by its name; name a recipe, and this file with data.path={path}"
    return f"cannot be read: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return _short(" ".join(str(error).split()), 500)


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
