"""Examples that a record makes, and its messages in other shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_prefix_tree.data.json_fields import ChatError, check_once, shorten_json

# ShareGPT's names of roles, as LLaMA-Factory reads them.
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Unchecked token ids of a sample, and the weight of each token; a ``loss_mask`` of None scores all."""

    ids: Any
    loss_mask: Any = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Unchecked messages with names for errors; the first ``prompt`` ones are unscored; ``cut`` as in read_cut."""

    messages: list[Any]
    names: list[str]
    tools: Any = None
    prompt: int = 0
    cut: str | None = None


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and its continuation, without a chat format; ``cut`` as :func:`read_cut` returns it.

    ``prompt`` is not scored; ``completion``, and a ``rival`` to compare it with, are scored from the same token on.
    """

    prompt: str
    completion: str
    rival: str | None = None
    cut: str | None = None


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a record, its ``part`` ("" for the entire record), with signals that only it has."""

    content: TokenIds | Conversation | Text
    signals: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""


def from_sharegpt(entry: Any, name: str) -> Any:
    """Return a message in OpenAI's shape from one in ShareGPT's."""
    check_once(entry, name)
    if not isinstance(entry, dict) or "role" in entry:
        return entry
    rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
    sender, value = entry.get("from"), entry.get("value")
    if not isinstance(sender, str) or sender not in _SHAREGPT_ROLES:
        raise ChatError(
            f"field '{name}.from' is {shorten_json(sender)}; it must be one of {', '.join(_SHAREGPT_ROLES)}"
        )
    if sender != "function_call":
        return rest | {"role": _SHAREGPT_ROLES[sender], "content": value}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ChatError(f"field '{name}.value' is a function call that is not valid JSON") from None
    return rest | {"role": "assistant", "tool_calls": value if isinstance(value, list) else [value]}


def count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of messages, or characters, that two completions begin with: TRL's implicit prompt."""
    pairs = enumerate(zip(one, other, strict=False))
    shared = next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
    return shared - 1 if shared and one[shared - 1] == " " else shared


def count_repeated(prompt: Sequence[Any], completion: Sequence[Any]) -> int:
    """Return how many messages at the end of a prompt a completion begins with: a question that both have."""
    before, after = [said_by(one) for one in prompt], [said_by(one) for one in completion]
    return next(
        (
            most
            for most in range(min(len(before), len(after)), 0, -1)
            if before[-most:] == after[:most] and not is_assistant(completion[most - 1])
        ),
        0,
    )


def said_by(message: Any) -> tuple[Any, Any]:
    """Return role and text of a message, whose content may be a list of parts."""
    if not isinstance(message, dict):
        return None, message
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text")) if isinstance(part, dict) else str(part) for part in content)
    return message.get("role"), content


def is_assistant(message: Any) -> bool:
    """Return whether a message is the assistant's."""
    return isinstance(message, dict) and message.get("role") == "assistant"
