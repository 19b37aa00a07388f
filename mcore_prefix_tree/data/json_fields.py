"""Checks of JSON values in chat records: text, depth, and the names of types in JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError


class ChatError(ValueError):
    """A conversation that cannot be parsed or encoded. The message names the field; the reader adds file and line."""


# Levels of objects and lists in arguments and tools. Encoders recurse once per level, so without a limit the depth of
# the caller's stack would decide whether a record passes.
MAX_DEPTH = 64
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep; flatten or remove it"
# Tokens of JSON, to walk text without decoding it.
_JSON = re.compile(
    r'[\s,:]*(?:"[^"\\]*(?:\\.[^"\\]*)*"|(?P<opens>[\[{])|(?P<closes>[\]}])|true|false|null|NaN|-?Infinity|[-+.\deE]+)',
    re.DOTALL,
)


class Doubled(dict[str, Any]):
    """An object that has a key more than once, the first of which is ``twice``; the dictionary holds the last value."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)


def check_once(value: object, field: str) -> None:
    """Raise ChatError for an object that has a key twice."""
    if isinstance(value, Doubled):
        raise ChatError(f"field '{field}' has the key '{value.twice}' twice; drop one of them")


def fault_of(error: ValueError, field: str = "") -> ChatError:
    """Return the error of a field, or of the field of it that a model finds first."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), ChatError):
            return cause
        field += "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        text = first["msg"].removeprefix("Value error, ").replace("Field required", "is missing")
        if text.startswith("Input should be "):
            wanted = text.removeprefix("Input should be ").replace("valid tuple", "list")
            text = f"must be {wanted}, not {shorten_json(first['input'])}"
    return ChatError(f"field '{field.removeprefix('.')}' {text}")


def check_depth(value: Any) -> Any:
    """Return a value, unless it has more than ``MAX_DEPTH`` levels; without a call for each. Raises ValueError."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, (dict, list, tuple))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return value


def check_json_depth(text: str) -> None:
    """Reject JSON text of more than ``MAX_DEPTH`` levels, without decoding it. Text that is not JSON passes."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = at = 0
    while part := _JSON.match(text, at):
        at = part.end()
        depth += (part["opens"] is not None) - (part["closes"] is not None)
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if depth <= 0:  # the value has ended; anything after it is not JSON
            return


def read_json(text: str, fault: str) -> Any:
    """Return the value of JSON text; raises ValueError, with the fault of other text."""
    check_json_depth(text)
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"is {shorten_json(text)}, {fault}") from None


def check_text(value: str) -> str:
    """Return text without half of a character; raises ValueError."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half of a surrogate pair at character {error.start}, which is not text; remove it"
        ) from None
    return value


Text = Annotated[str, AfterValidator(check_text)]


def format_json(value: object) -> str:
    """Return the JSON text of a value; raises ValueError."""
    try:
        return check_text(json.dumps(value, ensure_ascii=False))
    except TypeError as error:  # from a table: bytes, dates
        raise ValueError(f"cannot be written as JSON: {error}") from None


def shorten_json(value: object) -> str:
    """Return the beginning of a value's JSON text, for an error."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:  # it was just read, with a little less of the stack in use
        return "a nested list or object"
    return text if len(text) <= 40 else f"{text[:37]}..."
