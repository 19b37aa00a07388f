"""Types of a recipe's values, sections that check the rules between their keys, and sections without invalid keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.data.fields import check_names
from mcore_prefix_tree.utils.errors import Mistakes
from mcore_prefix_tree.utils.inputs import HUB, MOST, local_path

# The type of an error whose sentence quotes the value.
NOT_LOCAL = "not_local"

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def _no_boolean(value: object) -> object:
    """Reject a boolean, which Python takes for a number: ``train_iters: true`` is a slip."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "input should be a number, not a boolean")
    return value


def _names(value: dict[str, str | None]) -> dict[str, str | None]:
    try:
        check_names(value)
    except ValueError as error:
        raise PydanticCustomError("field_names", "{error}", {"error": str(error)}) from None
    return value


def local(value: str | list[str] | None) -> str | list[str] | None:
    """Return :func:`local_path` of a path, or of each; raises the error that pydantic reports."""
    try:
        return [local_path(one) for one in value] if isinstance(value, list) else value and local_path(value)
    except ValueError as error:
        raise PydanticCustomError(NOT_LOCAL, "{error}", {"error": str(error)}) from None


def _data(value: str | list[str] | None) -> str | list[str] | None:
    if isinstance(value, list):
        return [one if one.startswith(HUB) else str(local(one)) for one in value]
    return value if value is None or value.startswith(HUB) else local(value)


Number = BeforeValidator(_no_boolean)
PositiveInt = Annotated[int, Field(gt=0, le=MOST), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST), Number]
# torch's generators take 64 bits, and ranks add a little to theirs.
Seed = Annotated[int, Field(ge=0, lt=2**63), Number]
PositiveFloat = Annotated[float, Field(gt=0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0), Number]
Fields = Annotated[dict[str, str | None], AfterValidator(_names)]
# A path of this machine, or several; of data, also a name on the hub.
LocalPath = AfterValidator(local)
DataPath = AfterValidator(_data)
Dtype = Literal["float64", "float32", "bfloat16"]


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
    mistakes = Mistakes()
    for check in checks:
        with suppress(InvalidKeyError):
            mistakes.check(check)
    return mistakes.sentences


def broken_rules(section: Section) -> list[str]:
    """Return the sentences of all rules that a section of :func:`keep_valid` breaks, and the sections in it."""
    inside = [fault for part in vars(section).values() if isinstance(part, Section) for fault in broken_rules(part)]
    return inside + _broken(section)


def _broken(section: Section) -> list[str]:
    names = [name for kind in reversed(type(section).__mro__) for name in vars(kind) if name.startswith("_check_")]
    return collect_faults(getattr(section, name) for name in names)


def keep_valid(kind: Any, value: Any) -> Any:
    """Return a value of a type; for a section with invalid keys, one in which reading them raises InvalidKeyError.

    Raises ValidationError if the value is neither of the type nor a mapping of a section's keys.
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


def suggest_key(key: str, recipe: type) -> str:
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
    """A field of a section of settings."""

    hint: Any  # its type, with pydantic's validators
    default: Any  # its default; MISSING if it has none
    text: str  # description in its section's docstring


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
