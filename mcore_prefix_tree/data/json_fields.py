"""Checks of JSON values in chat records: text, depth, and the names of types in JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any


class ChatError(ValueError):
    """A conversation that cannot be parsed or encoded. The message names the field; the reader adds file and line."""


# Levels of objects and lists in arguments and tools. Encoders recurse once per level, so without a limit the depth of
# the caller's stack would decide whether a record passes.
MAX_DEPTH = 64
_TOO_DEEP = f"field '{{field}}' is nested more than {MAX_DEPTH} levels deep; flatten or remove it"
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


def check_depth(value: object, field: str) -> None:
    """Reject more than ``MAX_DEPTH`` levels, without a call for each."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, (dict, list, tuple))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ChatError(_TOO_DEEP.format(field=field))
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]


def check_json_depth(text: str, field: str) -> None:
    """Reject JSON text of more than ``MAX_DEPTH`` levels, without decoding it. Text that is not JSON passes."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = at = 0
    while part := _JSON.match(text, at):
        at = part.end()
        depth += (part["opens"] is not None) - (part["closes"] is not None)
        if depth > MAX_DEPTH:
            raise ChatError(_TOO_DEEP.format(field=field))
        if depth <= 0:  # the value has ended; anything after it is not JSON
            return


def read_text_value(value: object, field: str, expected: str = "a string") -> str:
    """Return a value that must be text; raises ChatError."""
    if not isinstance(value, str):
        raise ChatError(f"field '{field}' must be {expected}, not {json_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ChatError(
            f"field '{field}' has half of a surrogate pair at character {error.start}, which is not text; remove it"
        ) from None
    return value


def format_json(value: object, field: str) -> str:
    """Return the JSON text of a value."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # from a table: bytes, dates
        raise ChatError(f"field '{field}' cannot be written as JSON: {error}") from None
    return read_text_value(text, field)


def shorten_json(value: object) -> str:
    """Return the beginning of a value's JSON text, for an error."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:  # it was just read, with a little less of the stack in use
        return "a nested list or object"
    return text if len(text) <= 40 else f"{text[:37]}..."


def json_kind(value: object) -> str:
    """Return JSON's name for the type of ``value``."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
