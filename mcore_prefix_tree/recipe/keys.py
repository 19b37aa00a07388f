"""Hints for keys that a recipe does not have."""

from __future__ import annotations

from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import get_args, get_type_hints


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
