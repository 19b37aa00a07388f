"""The end of a generation: a token that the model wrote, or a limit that cut it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.data.chat_error import ChatError

# Keys of a message or of a record with one completion.
STOP_KEYS = ("finish_reason", "stop_reason", "truncated")
# Fields of a record with several completions, which are a list with an entry for each.
STOP_LISTS = ("finish_reasons", "stop_reasons")

# Reasons that engines and services give if the model did not end the text itself, in small letters: OpenAI's and
# vLLM's length and abort, Anthropic's and Gemini's max_tokens, slime's and SkyRL's statuses, ...
_CUTS = frozenset(
    {
        "abort", "aborted", "content_filter", "context_length", "context_window_exceeded", "incomplete", "length",
        "max_length", "max_new_tokens", "max_output_tokens", "max_tokens", "model_context_window_exceeded",
        "model_length", "token_limit", "truncated",
    }
)  # fmt: skip


def was_cut(given: Mapping[str, Any], where: str = "") -> bool:
    """Return whether one of ``STOP_KEYS`` says that a text was cut; raise ChatError if one has another type.

    In ``given``, a message or record, ``finish_reason`` and ``stop_reason`` are text, SGLang's object with a ``type``,
    or the id of the token that stopped the model; ``truncated`` is a boolean, 0 or 1. Null is the same as no key.
    """
    cut = [_is_cut(given.get(name), name, f"{where}{name}") for name in STOP_KEYS]  # each is checked
    return any(cut)


def were_cut(given: Mapping[str, Any], count: int, name: str) -> list[bool]:
    """Return whether each of ``count`` completions was cut; raise ChatError for a value of another length or type.

    Each of ``STOP_KEYS`` and ``STOP_LISTS`` in ``given`` is a list with an entry per completion, or one value for all.
    """
    cut = [False] * count
    for key in (*STOP_KEYS, *STOP_LISTS):
        value, single = given.get(key), key.removesuffix("s") if key in STOP_LISTS else key
        if isinstance(value, list) and len(value) != count:
            raise ChatError(f"field '{key}' must be a list of {count} entries, one for each of '{name}'")
        values = value if isinstance(value, list) else [value] * count
        cut = [
            before or _is_cut(one, single, f"{key}[{place}]" if value is values else key)
            for place, (before, one) in enumerate(zip(cut, values, strict=True))
        ]
    return cut


def with_end(completion: str, end: str, *, ended: bool) -> str:
    """Return a completion followed by ``end`` once if the model ``ended``, else without it and whitespace after it."""
    rendered = completion.rstrip()
    before = next((one.removesuffix(end) for one in (completion, rendered) if one.endswith(end)), completion)
    return f"{before}{end}" if ended else before


def _is_cut(value: object, key: str, field: str) -> bool:
    if value is None:
        return False
    if key == "truncated":
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
        raise ChatError(f"field '{field}' is {_shown(value)}; it must be true or false")
    if isinstance(value, dict):
        value = value.get("type")
    if isinstance(value, str):
        # Enumerations are written with their names: FinishReason.MAX_TOKENS, FINISH_REASON_LENGTH.
        return value.strip().lower().rpartition(".")[2].removeprefix("finish_reason_") in _CUTS
    if isinstance(value, int) and not isinstance(value, bool):
        return False
    raise ChatError(f'field \'{field}\' is {_shown(value)}; it must be text, such as "stop" or "length"')


def _shown(value: object) -> str:
    return f"{json.dumps(value, default=str):.40}"
