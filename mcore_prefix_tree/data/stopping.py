"""The end of a generation: a token that the model wrote, or a limit that cut it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.data.json_fields import ChatError, shorten_json
from mcore_prefix_tree.utils.launchers import is_first_rank

logger = logging.getLogger(__name__)

# Keys of a message or of a record with one completion.
STOP_KEYS = ("finish_reason", "stop_reason", "truncated")
# The same by the names that Gemini, Bedrock, Ollama, llama.cpp and OpenAI's other interfaces give them.
STOP_ALIASES = (
    "finishReason", "stopReason", "done_reason", "stop_type", "finish_details", "incomplete_details", "is_truncated",
)  # fmt: skip
# Fields of a record with several completions, which are a list with an entry for each.
STOP_LISTS = ("finish_reasons", "stop_reasons")
_FLAGS = ("truncated", "is_truncated")
_REASONS = ("finish_reason", "stop_reason", "finishReason", "stopReason", "done_reason")
# Keys of a message under which services keep reasons.
_METADATA = ("generation_info", "meta_info", "metadata", "response_metadata")

# Reasons that engines and services give if the model did not end the text itself, as _plain writes them: OpenAI's and
# vLLM's length and abort, Anthropic's and Gemini's max_tokens, slime's and SkyRL's statuses, ... A text that stops the
# model is none of its tokens either.
_CUTS = frozenset(
    {
        "abort", "aborted", "cancelled", "canceled", "content_filter", "content_filtered", "context_length",
        "context_length_exceeded", "context_window_exceeded", "error", "incomplete", "length", "length_limit", "limit",
        "max_completion_tokens", "max_context_length", "max_length", "max_model_len", "max_new_tokens",
        "max_output_tokens", "max_token", "max_tokens", "max_tokens_reached",
        "model_context_window_exceeded", "model_length", "overlong", "safety", "stop_sequence", "stop_str",
        "stop_string", "timeout", "token_limit", "token_limit_reached", "too_long", "truncated", "word",
    }
)  # fmt: skip
_ENDS = frozenset(
    {
        "", "complete", "completed", "done", "end", "end_of_turn", "end_turn", "eos", "eos_token", "finished",
        "function_call", "im_end", "max_turns", "none", "null", "ok", "refusal", "stop", "stop_token", "stopped",
        "success", "tool_call", "tool_calls", "tool_use", "unspecified",
    }
)  # fmt: skip
_unknown: set[str] = set()


def was_cut(given: Mapping[str, Any], where: str = "") -> bool:
    """Return whether a text was cut before the model ended it; raise ChatError if a value has another type.

    One of ``STOP_KEYS`` and ``STOP_ALIASES`` in ``given``, a message or record, is enough. A reason is text, an object
    with a ``type`` or ``reason``, or the id of the token that stopped the model; ``truncated`` is a boolean, 0 or 1.
    Null is the same as no key. ``where`` names a message in its record with a dot; its metadata is searched too.
    """
    # Each is checked.
    cut = [_is_cut(given[name], name, f"{where}{name}") for name in (*STOP_KEYS, *STOP_ALIASES) if name in given]
    cut.append(_is_stopped_by_text(given.get("finish_reason"), given.get("stop_reason")))
    for name in _METADATA if where else ():
        inner = given[name] if isinstance(given.get(name), dict) else {}
        found = [key for key in _REASONS if isinstance(inner.get(key), (str, dict))]  # other types are something else
        cut += [_is_cut(inner[key], key, f"{where}{name}.{key}") for key in found]
    if where and isinstance(given.get("status"), str):  # OpenAI's Responses, slime; a record's may be its task's
        cut.append(_plain(given["status"]) in ("incomplete", "truncated"))
    return any(cut)


def were_cut(given: Mapping[str, Any], count: int, name: str) -> list[bool]:
    """Return whether each of ``count`` completions was cut; raise ChatError for a value of another length or type.

    Each of ``STOP_KEYS``, ``STOP_ALIASES`` and ``STOP_LISTS`` in ``given`` is a list with an entry per completion, or
    one value for all.
    """
    each: dict[str, list[Any]] = {}
    cut = [False] * count
    for key in (*STOP_KEYS, *STOP_ALIASES, *STOP_LISTS):
        value, single = given.get(key), key.removesuffix("s") if key in STOP_LISTS else key
        if isinstance(value, list) and len(value) != count:
            raise ChatError(f"field '{key}' must be a list of {count} entries, one for each of '{name}'")
        values = value if isinstance(value, list) else [value] * count
        if value is not None:
            each[single] = values
        cut = [
            before or _is_cut(one, single, f"{key}[{place}]" if value is values else key)
            for place, (before, one) in enumerate(zip(cut, values, strict=True))
        ]
    reasons = (each.get(key, [None] * count) for key in ("finish_reason", "stop_reason"))
    return [before or _is_stopped_by_text(*one) for before, one in zip(cut, zip(*reasons, strict=True), strict=True)]


def with_end(completion: str, end: str, *, ended: bool) -> str:
    """Return a completion followed by ``end`` once if the model ``ended``, else without it and whitespace after it."""
    rendered = completion.rstrip()
    before = next((one.removesuffix(end) for one in (completion, rendered) if one.endswith(end)), completion)
    return f"{before}{end}" if ended else before


def _is_cut(value: object, key: str, field: str) -> bool:
    if value is None:
        return False
    if key in _FLAGS:
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
        raise ChatError(f"field '{field}' is {shorten_json(value)}; it must be true or false")
    if isinstance(value, dict):
        if isinstance(value.get("matched"), str):  # SGLang: a text stopped the model
            return True
        value = value.get("type", value.get("reason"))
    if isinstance(value, str):
        reason = _plain(value)
        if reason not in _CUTS | _ENDS and key != "stop_reason":
            _warn_unknown(value, field)
        return reason in _CUTS
    if isinstance(value, int) and not isinstance(value, bool):
        return False
    raise ChatError(f'field \'{field}\' is {shorten_json(value)}; it must be text, such as "stop" or "length"')


def _is_stopped_by_text(finish: object, stop: object) -> bool:
    """Return whether a text stopped the model, which vLLM gives as ``stop_reason`` beside ``finish_reason``."""
    if not isinstance(stop, str) or _plain(stop) in _CUTS | _ENDS:
        return False
    if finish != "stop":
        _warn_unknown(stop, "stop_reason")
    return finish == "stop"


def _plain(reason: str) -> str:
    """Return a reason in one spelling: ``FinishReason.MAX_TOKENS``, ``MaxTokens`` and ``max-tokens`` are one."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", reason.strip().rpartition(".")[2])
    return re.sub(r"[\s_-]+", "_", words).lower().removeprefix("finish_reason_").removeprefix("stop_reason_")


def _warn_unknown(value: str, field: str) -> None:
    if value not in _unknown and is_first_rank():
        logger.warning(
            "field '%s' is %s, which is taken as an end that the model wrote; write \"length\" if it was cut",
            field,
            shorten_json(value),
        )
    _unknown.add(value)
