"""Content of a recipe's file and of ``key=value`` overrides, before it is validated."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mcore_prefix_tree.inputs import local_path, read_text
from mcore_prefix_tree.recipe.rules import collect_faults
from mcore_prefix_tree.recipe.sections import RecipeError

logger = logging.getLogger(__name__)

# Numbers that YAML 1.1 does not read as they look: 1:30 is 90, to base 60, and 010 is 8.
_MISLEADING = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
# OmegaConf takes it for a value that comes later, and ignores it in an override.
_MISSING = "???"
_Scanner: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one is slow on deep nesting
_UNREADABLE = (OmegaConfBaseException, YAMLError, OSError, RecursionError, TypeError, ValueError)


def parse_recipe(path: str, overrides: Sequence[str]) -> tuple[dict[Any, Any], list[str], set[str]]:
    """Return the content of a recipe, sentences about what cannot be read, and the keys that are unknown for that.

    Raises:
        RecipeError: the file cannot be read at all.
    """
    merged = _read_file(path)
    changes: list[DictConfig] = []
    faults = collect_faults(partial(_override, merged, override, changes) for override in overrides)
    _notice_doubled(overrides)
    unread: set[str] = set()
    try:
        content = _resolve(path, merged, faults, unread)
        _replace_warmup(content, [OmegaConf.to_container(change, resolve=False) for change in changes])
    except _UNREADABLE as error:
        raise RecipeError("; ".join([*faults, f"recipe {path} cannot be read: {one_line(error)}"])) from error
    return content, faults, unread


def _read_file(path: str) -> DictConfig:
    try:
        text = read_text(local_path(path))
        _check_scalars(text)
        content = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise RecipeError(f"recipe {path} does not exist") from None
    except _UNREADABLE as error:
        raise RecipeError(f"recipe {path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, DictConfig):
        raise RecipeError(f"recipe {path} is a list; it must map keys to values")
    return content


def _resolve(path: str, merged: DictConfig, faults: list[str], unread: set[str]) -> Any:
    """Return plain values, with null in place of those that name what there is not."""
    try:
        return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = re.sub(r"\[(\d+)\]", r".\1", error.full_key or "")
        if not key or key in unread:
            raise
        faults.append(f"recipe {path} cannot be read: {one_line(error)}")
        unread.add(key)
        OmegaConf.update(merged, key, None)
    return _resolve(path, merged, faults, unread)


def _notice_doubled(overrides: Sequence[str]) -> None:
    """Warn of a key that is set twice, on the first rank: the last value counts, as a script may want that adds one."""
    given: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if given.setdefault(key, value) != value and os.environ.get("RANK", "0") == "0":
            logger.warning("%s is set twice, to %s and to %s; the last counts", key, short(given[key]), short(value))
        given[key] = value


def _replace_warmup(content: dict[Any, Any], changes: Sequence[Any]) -> None:
    """Drop the file's warm-up if overrides set it by its other key: a command line need not unset what it replaces."""
    sections = [section for change in changes if isinstance(section := change.get("optimizer"), dict)]
    given = {key: value for section in sections for key, value in section.items()}
    steps, fraction = (given.get(key) is not None for key in ("lr_warmup_steps", "lr_warmup_fraction"))
    options = content.get("optimizer")
    if steps != fraction and isinstance(options, dict):
        options.pop("lr_warmup_fraction" if steps else "lr_warmup_steps", None)


def _read_override(override: str) -> DictConfig:
    if "=" not in override or not all(override.partition("=")[0].split(".")):
        raise RecipeError(f"{override!r} is not an override; write key=value, for example train_iters=10")
    key, _, value = override.partition("=")
    # Standard input, which YAML reads as a list of nothing; and globs, which it takes for a name or a mapping.
    if value == "-" or (value.startswith(("*", "{")) and not _is_yaml(value)):
        value = json.dumps(value)
    try:
        _check_scalars(value)
        return OmegaConf.from_dotlist([f"{key}={value}"])
    except UnicodeEncodeError:
        raise RecipeError(f"override {short(override)!r} is not UTF-8; rename the file that it names") from None
    except _UNREADABLE as error:
        raise RecipeError(f"override {short(override)!r}: {one_line(error)}") from error


def _override(recipe: DictConfig, override: str, changes: list[DictConfig]) -> None:
    """Change a recipe, which nobody else has, rather than copy all of it for each override; note the change."""
    change = _read_override(override)
    try:
        OmegaConf.unsafe_merge(recipe, change)
    except _UNREADABLE as error:
        raise RecipeError(f"override {short(override)!r}: {one_line(error)}") from error
    changes.append(change)


def _check_scalars(text: str) -> None:
    """Reject what YAML or OmegaConf would read as something else than its writer means.

    Raises:
        ValueError: a scalar would be misread; names the line and the scalar.
        YAMLError: the text is not YAML.
    """
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


def one_line(error: Exception) -> str:
    """Return what an error says, shortened."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return short(" ".join(str(error).split()), 500)


def short(text: str, most: int = 100) -> str:
    """Return a text without its middle if it is longer than ``most``."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
