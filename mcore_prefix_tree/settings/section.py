"""Sections that check the rules between their keys when they are built, and sections that lack their invalid keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.utils.errors import sentence_of

# The type of an error about several keys together, each of which has a valid value.
AT_ODDS = "at_odds"
# A check raises an error for a mistake; its return value is ignored.
Check = Callable[[], object]


class InvalidKeyError(Exception):
    """A check reads a key whose value is invalid, which is reported already."""


class Section:
    """A part of a recipe, whose methods ``_check_...`` are rules between its keys: they raise ValueError."""

    def __post_init__(self) -> None:
        """Check all rules, and report those that are broken together."""
        faults = _broken(self)
        if faults:
            raise PydanticCustomError(AT_ODDS, "{faults}", {"faults": "; ".join(faults)})


def collect_faults(checks: Iterable[Check]) -> list[str]:
    """Run checks, and return the sentences of those that fail; one that reads an invalid key is skipped."""
    return [fault for fault in map(_find_fault, checks) if fault is not None]


def _find_fault(check: Check) -> str | None:
    try:
        check()
    except InvalidKeyError:
        return None
    except (ValueError, OSError, ImportError) as error:
        return sentence_of(error)
    return None


def broken_rules(section: Section) -> list[str]:
    """Return the sentences of all rules that a section of :func:`keep_valid` breaks, and the sections in it."""
    inside = [fault for part in vars(section).values() if isinstance(part, Section) for fault in broken_rules(part)]
    return inside + _broken(section)


def _broken(section: Section) -> list[str]:
    names = [name for kind in reversed(type(section).__mro__) for name in vars(kind) if name.startswith("_check_")]
    return collect_faults(getattr(section, name) for name in names)


def keep_valid(kind: Any, value: Any) -> Any:
    """Return a value of a type; for a section with invalid keys, one in which reading them raises InvalidKeyError.

    Raises:
        ValidationError: the value is neither of the type nor a mapping of a section's keys.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        sections = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, Section)]
        if not sections or not isinstance(value, dict):
            raise
    section: Any = sections[0]
    valid: Any = object.__new__(type(section.__name__, (section,), {"__getattribute__": _read_valid}))
    hints = get_type_hints(section, include_extras=True)
    misspelled = {near for key in value if key not in hints for near in get_close_matches(str(key), hints, n=1)}
    for field in fields(section):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        with suppress(ValidationError):
            if field.name in value:
                vars(valid)[field.name] = keep_valid(hints[field.name], value[field.name])
            elif default is not MISSING and field.name not in misspelled:
                vars(valid)[field.name] = default
    return valid


def _read_valid(section: Any, name: str) -> Any:
    values = object.__getattribute__(section, "__dict__")
    if name in type(section).__dataclass_fields__ and name not in values:
        raise InvalidKeyError(name)
    return object.__getattribute__(section, name)
