"""Messages of one record, checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mcore_prefix_tree.data.chat import ROLES, ChatMessage, ToolCall
from mcore_prefix_tree.data.json_fields import ChatError, check_once, json_kind, read_text_value
from mcore_prefix_tree.data.stopping import was_cut
from mcore_prefix_tree.data.tools import parse_tool_calls
from mcore_prefix_tree.data.turns import INTERPRETED, check_part, check_refused_keys, read_thinking, read_weight


def parse_messages(value: object, names: Sequence[str] | None = None) -> list[ChatMessage]:
    """Check the ``messages`` of a record and fill in fields that training data commonly omits.

    Tool calls come as ``{"name", "arguments"}`` or in OpenAI's shape ``{"id", "type", "function": {"name",
    "arguments"}}``; arguments as JSON text or as an object, or empty for none. A call without an id gets its ordinal in
    the conversation as the id (``call00001``, nine alphanumerics, as Mistral's formats require), so that rollouts which
    begin alike keep beginning alike. A tool result without ``tool_call_id`` answers the oldest open call (of its name,
    if it has one); after an assistant message whose call is raw text it answers that text. Arguments are at most
    ``MAX_DEPTH`` levels deep. Content is text, or OpenAI's list of parts of text, which are joined.

    An assistant message may be empty, keep its thinking apart (:data:`THINKING`), be switched off or weighted for
    training, and say that the model was cut off; see :mod:`mcore_prefix_tree.data.turns` and
    :mod:`mcore_prefix_tree.data.stopping`. Other keys are kept for chat templates.

    Raises:
        ChatError: a message is malformed; names the field by ``names``, for example ``messages[3].tool_calls[0].name``.
    """
    if not isinstance(value, list) or not value:
        raise ChatError("field 'messages' must be a list of at least one chat message")
    messages: list[ChatMessage] = []
    open_calls: list[ToolCall] = []
    calls_seen = 0
    for index, entry in enumerate(value):
        field = f"messages[{index}]" if names is None else names[index]
        message = _message(entry, field, calls_seen)
        calls_seen += len(message.tool_calls)
        open_calls += message.tool_calls
        nearest = next((before for before in reversed(messages) if before.role == "assistant"), None)
        # An assistant message without a structured call had its call as text.
        if message.role == "tool" and (nearest is None or nearest.tool_calls):
            answered = _answered_call(entry, field, open_calls)
            open_calls.remove(answered)
            message = replace(message, tool_call_id=answered.id)
        messages.append(message)
    if not any(message.role == "assistant" for message in messages):
        name = "messages" if names is None else names[-1].partition("[")[0]
        raise ChatError(f"field '{name}' has no assistant message, so no token of it would be scored")
    return messages


def _message(entry: object, field: str, calls_seen: int) -> ChatMessage:
    """Return one message; the call that a tool result answers is the record's, if it names one."""
    if not isinstance(entry, dict):
        raise ChatError(f"field '{field}' must be an object with 'role' and 'content', not {json_kind(entry)}")
    check_once(entry, field)
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        found = json.dumps(role) if isinstance(role, str) else json_kind(role)
        raise ChatError(f"field '{field}.role' is {found}; roles are {', '.join(ROLES)}")
    check_refused_keys(entry, field)
    tool_calls = parse_tool_calls(entry.get("tool_calls"), f"{field}.tool_calls", calls_seen)
    if tool_calls and role != "assistant":
        raise ChatError(f"field '{field}.tool_calls' belongs to an assistant message, not to role '{role}'")
    is_result = role == "tool"
    return ChatMessage(
        role=role,
        content=_content("" if content is None and role == "assistant" else content, f"{field}.content"),
        tool_calls=tool_calls,
        tool_call_id=_optional_text(entry, "tool_call_id", field) if is_result else None,
        name=_optional_text(entry, "name", field) if is_result else None,
        thinking=read_thinking(entry, role, field),
        weight=read_weight(entry, role, field),
        is_cut=role == "assistant" and was_cut(entry, f"{field}."),
        others={key: one for key, one in entry.items() if key not in INTERPRETED and one is not None},
    )


def _optional_text(entry: dict[str, Any], name: str, field: str) -> str | None:
    value = entry.get(name)
    return None if value is None else read_text_value(value, f"{field}.{name}")


def _content(value: object, field: str) -> str:
    """Return the text of a message; its parts, if it has some, are joined as chat templates write them."""
    if not isinstance(value, list):
        return read_text_value(value, field)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            found = f"of type {json.dumps(kind)}" if isinstance(kind, str) else json_kind(part)
            raise ChatError(f"field '{field}[{index}]' is {found}; only parts of type \"text\" can be trained on")
        check_part(part, f"{field}[{index}]")
        texts.append(read_text_value(part.get("text"), f"{field}[{index}].text"))
    return "".join(texts)


def _answered_call(entry: dict[str, object], field: str, open_calls: list[ToolCall]) -> ToolCall:
    call_id, name = entry.get("tool_call_id"), entry.get("name")
    for call in open_calls:
        if call_id == call.id or (call_id is None and name in (None, call.name)):
            return call
    described = "" if call_id is None else f" with id '{call_id}'"
    described += "" if name is None else f" of '{name}'"
    raise ChatError(f"field '{field}' is a tool result, but no assistant message before it has an open call{described}")
