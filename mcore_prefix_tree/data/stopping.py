"""The end of a generation: a token that the model wrote, or a limit or a text that cut it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.data.json_fields import ChatError, shorten_json
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

# Keys of a message or of a record with one completion; and of one with several, as lists.
STOP_KEYS = ("finish_reason", "stop_reason")
STOP_LISTS = ("finish_reasons", "stop_reasons")
# Other names of them, which are refused.
STOP_NAMES = (
    "truncated", "is_truncated", "finishReason", "stopReason", "done_reason", "stop_type", "finish_details",
    "incomplete_details", "finish_type", "end_reason", "stopping_reason", "completion_reason", "was_truncated",
)  # fmt: skip

# Reasons that engines and services give if the model did not end the text itself, as _plain writes them: OpenAI's and
# vLLM's length and abort, Anthropic's and Gemini's max_tokens, slime's and SkyRL's statuses, ... A text that stops the
# model is none of its tokens either.
CUTS = frozenset(
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


def read_cut(given: Mapping[str, Any], where: str = "", *, of_harness: bool = False) -> str | None:
    """Return None for a text that the model ended, "" for one cut at a limit, else the text that stopped the model.

    That text may be the token that ends a turn, which only the tokenizer knows. A reason is text, an object with a
    ``type`` or ``reason``, or the id of the token that stopped the model. ``where`` names a message in its record with
    a dot. With ``of_harness``, a ``stop_reason`` of words may come from an agent harness and not from an engine.
    """
    check_names(given, where)
    finish, stop = given.get("finish_reason"), given.get("stop_reason")
    is_limit = False
    for key, value in zip(STOP_KEYS, (finish, stop), strict=True):
        if isinstance(value, dict):
            value = value.get("type", value.get("reason", value))
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            continue
        if not isinstance(value, str):
            raise ChatError(
                f'field \'{where}{key}\' is {shorten_json(value)}; it must be text, such as "stop" or "length"'
            )
        is_limit |= _plain(value) in CUTS
        if _plain(value) not in CUTS | _ENDS and key != "stop_reason":
            _warn_unknown(value, f"{where}{key}")
    if is_limit:
        return ""
    if isinstance(finish, dict) and isinstance(finish.get("matched"), str):  # SGLang
        return str(finish["matched"])
    if not isinstance(stop, str) or _plain(stop) in CUTS | _ENDS:
        return None
    if finish == "stop" and not (of_harness and re.fullmatch(r"\w+([ -]\w+)*", stop)):  # vLLM
        return stop
    _warn_unknown(stop, f"{where}stop_reason")
    return None


def read_cuts(given: Mapping[str, Any], count: int, name: str) -> list[str | None]:
    """Return :func:`read_cut` of each of ``count`` completions, from lists or values for all; raise ChatError."""
    check_names(given, "")
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for key in (*STOP_KEYS, *STOP_LISTS):
        value = given.get(key)
        if isinstance(value, list) and len(value) != count:
            raise ChatError(f"field '{key}' must be a list of {count} entries, one for each of '{name}'")
        for one, own in zip(value if isinstance(value, list) else [value] * count, each, strict=True):
            if one is not None:
                own[key.removesuffix("s") if key in STOP_LISTS else key] = one
    return [read_cut(own) for own in each]


def check_names(given: Mapping[str, Any], where: str) -> None:
    """Raise ChatError for another name of ``STOP_KEYS``, also within metadata of a message."""
    found = [(name, given.get(name)) for name in STOP_NAMES]
    if where:
        found += [
            (f"{outer}.{name}", inner[name])
            for outer, inner in given.items()
            if isinstance(inner, dict) and outer not in STOP_KEYS
            for name in (*STOP_KEYS, *STOP_NAMES)
            if name in inner and not (outer in ("metadata",) and type(inner[name]) in (int, bool))
        ]
        if isinstance(given.get("status"), str) and _plain(given["status"]) in CUTS:
            found.append(("status", given["status"]))
    for name, value in found:
        if value is not None and value is not False and value != 0:
            raise ChatError(
                f"field '{where}{name}' is not read, though it says how the generation ended; call it 'finish_reason', "
                'with "length" for a text that was cut and "stop" for one that the model ended'
                + ("" if where else f", or leave it unread: data.fields={{{name}: null}}")
            )


def with_end(completion: str, end: str, *, ended: bool) -> str:
    """Return a completion followed by ``end`` once if the model ``ended``, else without it and whitespace after it."""
    rendered = completion.rstrip()
    before = next((one.removesuffix(end) for one in (completion, rendered) if one.endswith(end)), completion)
    return f"{before}{end}" if ended else before


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
