"""Checks of objectives' settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

# Of every objective: a misspelt option is an error, and so is an option that is not a finite number.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def known_name(known: Iterable[str]) -> AfterValidator:
    """Accept only known names, and reject others in pydantic's words for a ``Literal``."""
    names = tuple(known)
    *but_last, last = map(repr, names)

    def check(name: str) -> str:
        if name not in names:
            expected = {"expected": f"{', '.join(but_last)} or {last}"}
            raise PydanticCustomError("literal_error", "Input should be {expected}", expected)
        return name

    return AfterValidator(check)


def refuse_unused(objective: Any, settings: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ValueError for the first setting that is set without effect.

    ``settings`` are the name of each, whether it has an effect with the others, and which of those would give it one.
    """
    fields = type(objective).__pydantic_fields__
    for name, has_effect, without in settings:
        value = getattr(objective, name)
        if not has_effect and value != fields[name].default:
            raise ValueError(f"{name}={value} has no effect without {without}; remove it")
