"""The keys of a recipe: the fields that they name, and hints for unknown keys."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from typing import Any, get_args, get_type_hints

from pydantic.fields import FieldInfo


def instead_of(key: str, recipe: type) -> str:
    """Return the end of a sentence: a similar key, a key of this name elsewhere, or all keys of the section."""
    known = [one.rpartition(".") for one in _keys(recipe)]
    section, _, name = key.rpartition(".")
    beside = [own for of, _, own in known if of == section]
    near = [f"{section}.{own}".removeprefix(".") for own in get_close_matches(name, beside, n=1)]
    near += [f"{of}.{own}" for of, _, own in known if own == name]
    if near:
        return f"did you mean {near[0]}?"
    return f"{section or 'a recipe'} has {', '.join(beside)}"


def _keys(section: type, prefix: str = "") -> list[str]:
    """Return all keys of a section and of the sections in it."""
    keys = []
    for name, hint in get_type_hints(section).items():
        keys.append(prefix + name)
        for part in (hint, *get_args(hint)):  # a section, or one that may be missing
            if is_dataclass(part) and isinstance(part, type):
                keys += _keys(part, f"{prefix}{name}.")
    return keys


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a section of settings.

    Attributes:
        hint: its type, with pydantic's validators.
        default: its default; ``MISSING`` if it has none.
        text: description in its section's docstring.
    """

    hint: Any
    default: Any
    text: str


@cache
def find_setting(section: type, key: str) -> Setting:
    """Return the field that a key names, for example ``batch.max_tokens`` of a recipe."""
    *sections, name = key.split(".")
    for part in sections:
        section = get_type_hints(section)[part]
    field = next(field for field in fields(section) if field.name == name)  # type: ignore[arg-type]
    default = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True)
    elif field.default_factory is not MISSING:
        default = field.default_factory()
    entry = re.search(rf"^    {name}: (.+(?:\n        .+)*)", cleandoc(section.__doc__ or ""), re.MULTILINE)
    text = " ".join(entry[1].split()) if entry else ""
    return Setting(hint=get_type_hints(section, include_extras=True)[name], default=default, text=text)
