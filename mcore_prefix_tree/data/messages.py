"""Messages and tools of one record, checked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_prefix_tree.data.chat import ROLES, ChatMessage, Tool, ToolCall
from mcore_prefix_tree.data.json_fields import (
    ChatError,
    check_depth,
    check_json_depth,
    check_once,
    format_json,
    json_kind,
    read_text_value,
    shorten_json,
)
from mcore_prefix_tree.data.keys import plain
from mcore_prefix_tree.data.stopping import STOP_KEYS, read_cut

# Names of an assistant's thinking, in data and in chat templates.
THINKING = ("reasoning_content", "reasoning", "thinking")
# Whether, and with which weight, an assistant message is trained on.
SWITCHES = ("loss", "weight", "train")
KEYS_OF_MESSAGES = ("role", "content", "tool_calls", "tool_call_id", "name", *THINKING, *SWITCHES, *STOP_KEYS)
# Other keys that change what is trained on, with the way out.
_WEIGHT, _ON, _OFF = "call it 'weight'", "call it 'loss'", "call it 'loss', with 0 for a message that is not trained on"
_REFUSED = {
    "function_call": "give it as tool_calls",
    **dict.fromkeys(("train_detail", "training_detail"), "give 'tokens' with a 'loss_mask'"),
    **dict.fromkeys(("loss_scale", "loss_weight", "message_weight", "token_weight", "turn_weight", "weights"), _WEIGHT),
    **dict.fromkeys(
        (
            "loss_mask", "step_loss_mask", "is_train", "train_on_turn", "train_on_message", "trainable", "training",
            "is_trainable", "trained", "trained_on", "do_train", "should_train", "learn", "learnable", "compute_loss",
            "calculate_loss", "has_loss", "use_loss", "supervised", "supervise", "train_mask", "loss_flag",
        ), _ON,
    ),
    **dict.fromkeys(
        (
            "masked", "is_masked", "mask", "ignore_loss", "no_loss", "skip_loss", "exclude_from_loss", "mask_loss",
            "ignore", "ignored", "exclude", "excluded", "no_train", "skip_train", "skip_training", "mask_message",
        ), _OFF,
    ),
}  # fmt: skip
# Other names of what a message says, which few chat templates read, and the names that are read here.
_SAID = {"refusal": "content"} | dict.fromkeys(
    (
        "analysis", "chain_of_thought", "reasoning_details", "reasoning_text", "thinking_blocks", "thinking_content",
        "thought", "thoughts",
    ),
    "reasoning_content",
)  # fmt: skip
_OF_CALLS = {"id", "type", "index", "function", "name", "arguments"}


def parse_messages(value: object, names: Sequence[str] | None = None, tools: Sequence[Tool] = ()) -> list[ChatMessage]:
    """Check the ``messages`` of a record and fill in fields that training data commonly omits.

    Tool calls come as ``{"name", "arguments"}`` or in OpenAI's shape ``{"id", "type", "function": {"name",
    "arguments"}}``; arguments as JSON text or as an object, or empty for none. Nulls of an object that the schema of
    the tool, among ``tools``, has no name for are dropped: data sets give all rows the keys of any. A call without an
    id gets its ordinal in the conversation as the id (``call00001``, nine alphanumerics, as Mistral's formats require),
    so that rollouts which begin alike keep beginning alike. A tool result without ``tool_call_id`` answers the oldest
    open call (of its name, if it has one); after an assistant message whose call is raw text it answers that text.
    Content is text, or OpenAI's list of parts of text, which are joined.

    An assistant message may be empty, keep its thinking apart (:data:`THINKING`), be weighted or switched off for
    training (:data:`SWITCHES`), and say that the model was cut off (:mod:`mcore_prefix_tree.data.stopping`). Other keys
    are kept for chat templates.

    Raises:
        ChatError: a message is malformed; names the field by ``names``, for example ``messages[3].tool_calls[0].name``.
    """
    if not isinstance(value, list) or not value:
        raise ChatError("field 'messages' must be a list of at least one chat message")
    schemas = {tool.name: tool.function.get("parameters") for tool in tools}
    messages: list[ChatMessage] = []
    open_calls: list[ToolCall] = []
    calls_seen = 0
    for index, entry in enumerate(value):
        field = f"messages[{index}]" if names is None else names[index]
        message = _message(entry, field, calls_seen, schemas)
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


def _message(entry: object, field: str, calls_seen: int, schemas: Mapping[str, Any]) -> ChatMessage:
    """Return one message; the call that a tool result answers is the record's, if it names one."""
    if not isinstance(entry, dict):
        raise ChatError(f"field '{field}' must be an object with 'role' and 'content', not {json_kind(entry)}")
    check_once(entry, field)
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        found = json.dumps(role) if isinstance(role, str) else json_kind(role)
        raise ChatError(f"field '{field}.role' is {found}; roles are {', '.join(ROLES)}")
    for name, value in entry.items():
        way_out = _REFUSED.get(plain(name))
        if way_out is None or value is None or isinstance(value, str) or name in KEYS_OF_MESSAGES:
            continue
        if role == "assistant" and (value or way_out != _OFF):
            raise ChatError(f"field '{field}.{name}' changes what is trained on, and is not read: {way_out}")
    tool_calls = _tool_calls(entry.get("tool_calls"), f"{field}.tool_calls", calls_seen, schemas)
    if tool_calls and role != "assistant":
        raise ChatError(f"field '{field}.tool_calls' belongs to an assistant message, not to role '{role}'")
    is_result, cut = role == "tool", read_cut(entry, f"{field}.") if role == "assistant" else None
    return ChatMessage(
        role=role,
        content=_content("" if content is None and role == "assistant" else content, f"{field}.content"),
        tool_calls=tool_calls,
        tool_call_id=_optional_text(entry, "tool_call_id", field) if is_result else None,
        name=_optional_text(entry, "name", field) if is_result else None,
        thinking=_read_thinking(entry, role, field),
        weight=_read_weight(entry, role, field),
        is_cut=cut is not None,
        stopped_by=cut or "",
        others={
            key: one
            for key, one in entry.items()
            if one is not None and (key not in KEYS_OF_MESSAGES or (key == "name" and not is_result))
        },
    )


def check_said(
    said: Mapping[str, Any], field: str, *, has_thinking: bool, is_read: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise ChatError for text of a scored message under a name which is neither read here nor by the chat template.

    ``said`` has the keys of the message that are not read; thinking that ``has_thinking`` repeats may be left.
    """
    for name, ours in _SAID.items():
        if said.get(name) and not (has_thinking and ours != "content") and not is_read(name):
            raise ChatError(
                f"field '{field}.{name}' is not read, so that the model would not be trained on it; call it '{ours}', "
                "or remove it"
            )


def unread_keys(value: Any, reads: Callable[[str], bool]) -> set[str]:
    """Return the keys of messages that neither this package nor a chat template ``reads``, as ``messages[].key``."""
    found = set()
    for entry in value:
        own = {key for key, one in entry.items() if one is not None and key not in KEYS_OF_MESSAGES}
        found |= {f"messages[].{key}" for key in own}
        for call in entry.get("tool_calls") or []:
            inner = call.get("function")
            keys = {*call, *(inner if isinstance(inner, dict) else ())} - _OF_CALLS
            found |= {f"messages[].tool_calls[].{key}" for key in keys if (call | (inner or {})).get(key) is not None}
    return {name for name in found if not reads(name.rpartition(".")[2])}


def _read_weight(message: Mapping[str, Any], role: str, field: str) -> float:
    """Return the weight of an assistant message's tokens: 0 if a switch turns it off, 1 without a switch."""
    weights = {name: _weight(message[name], f"{field}.{name}") for name in SWITCHES if message.get(name) is not None}
    if role != "assistant":
        asks = next((name for name, weight in weights.items() if weight and name != "weight"), None)
        if asks is not None:
            raise ChatError(
                f"field '{field}.{asks}' asks to train on a message of role '{role}', but only assistant messages are "
                f"scored; remove it or set it to 0, or give 'tokens' with a 'loss_mask'"
            )
        return 1.0  # nobody reads it
    if len(set(weights.values())) > 1:
        (first, one), *others = weights.items()
        second, other = next(pair for pair in others if pair[1] != one)
        raise ChatError(
            f"fields '{field}.{first}' and '{field}.{second}' contradict each other: their weights are {one:g} and "
            f"{other:g}; give one of them"
        )
    return next(iter(weights.values()), 1.0)


def _weight(value: object, field: str) -> float:
    if not isinstance(value, (bool, int, float)) or not 0 <= value <= sys.float_info.max:
        shown = f"{value:.20}" if isinstance(value, float) else json_kind(value)
        if isinstance(value, int) and not isinstance(value, bool):
            shown = str(value) if abs(value) < 10**20 else "one that large"
        raise ChatError(f"field '{field}' must be true, false or a number of at least 0, not {shown}")
    return float(value)


def _read_thinking(message: Mapping[str, Any], role: str, field: str) -> str:
    """Return the thinking that a message keeps apart, or ""; raise ChatError for other types, names or roles."""
    given = {name: text for name in THINKING if (text := _optional_text(message, name, field))}
    if not given:
        return ""
    if role != "assistant":
        raise ChatError(f"field '{field}.{next(iter(given))}' belongs to an assistant message, not to role '{role}'")
    if len(set(given.values())) > 1:
        names = " and ".join(f"'{field}.{name}'" for name in given)
        raise ChatError(f"fields {names} hold different texts; give one of them")
    return next(iter(given.values()))


def _optional_text(entry: Mapping[str, Any], name: str, field: str) -> str | None:
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
        for name, value_of_part in part.items():
            if value_of_part is not None and (name in SWITCHES or plain(name) in _REFUSED):
                raise ChatError(
                    f"field '{field}[{index}].{name}' switches training of a part of a message, but a message is "
                    "trained on as a whole; give the switch to the message, or 'tokens' with a 'loss_mask'"
                )
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


def _tool_calls(value: object, field: str, calls_seen: int, schemas: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Check a message's tool calls, if any, after ``calls_seen`` others; raise ChatError with ``field``."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ChatError(f"field '{field}' must be a list, not {json_kind(value)}")
    calls = []
    for index, entry in enumerate(value):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise ChatError(f"field '{field}[{index}]' must be an object with 'name' and 'arguments'")
        name = read_text_value(function.get("name"), f"{field}[{index}].name")
        arguments = _read_arguments(function.get("arguments"), f"{field}[{index}].arguments", schemas.get(name))
        call_id = _optional_text(entry, "id", f"{field}[{index}]")
        call_id = f"call{calls_seen + index + 1:05d}" if call_id is None else call_id
        calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
    return tuple(calls)


def _read_arguments(value: object, field: str, schema: object) -> str:
    """Return the JSON text of a call's arguments."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"  # as engines read a call without arguments
    if isinstance(value, dict):
        check_depth(value, field)
        value = format_json(_without_absent(value, schema), field)
    text = read_text_value(value, field, expected="an object or its JSON text")
    check_json_depth(text, field)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = ""
    if isinstance(parsed, str):
        raise ChatError(
            f"field '{field}' is {shorten_json(text)}, which is no JSON object, so that the text that the model wrote "
            "cannot be known; give token ids"
        )
    format_json(parsed, field)  # escapes may stop being text when a chat format decodes them
    return text


def _without_absent(value: Any, schema: Any) -> Any:
    """Drop nulls under names that a JSON schema with names lacks."""
    if isinstance(value, list):
        return [_without_absent(one, schema.get("items") if isinstance(schema, dict) else None) for one in value]
    known = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(value, dict) or not isinstance(known, dict):
        return value
    return {
        name: _without_absent(one, known.get(name))
        for name, one in value.items()
        if one is not None or known.get(name) is not None
    }


def parse_tools(value: object) -> list[Tool]:
    """Check the ``tools`` of a record: the functions that the model could call.

    They are kept as they are, since chat formats write them out for the model to read: OpenAI's shape ``{"type",
    "function": {"name", ...}}`` with all its keys, nulls included, but for nulls among ``properties``. Two forms are
    unified: a function without that shell, ``{"name", ...}``, gets it, and a JSON schema in ``parameters`` that is JSON
    text becomes the object, as the list itself does. Each value is at most ``MAX_DEPTH`` levels deep.

    Raises:
        ChatError: a tool is malformed; names the field, for example ``tools[3].name``.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    value = _read_json(value, "tools", "a list of tools")
    if not isinstance(value, list):
        raise ChatError(f"field 'tools' must be a list, not {json_kind(value)}")
    return [_tool(entry, f"tools[{index}]") for index, entry in enumerate(value)]


def _tool(entry: object, field: str) -> Tool:
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    in_shell = "function" in given
    function = given["function"] if in_shell else {name: one for name, one in given.items() if name != "type"}
    if not isinstance(function, dict) or not given:
        raise ChatError(f"field '{field}' must be an object with 'name', 'description' and 'parameters'")
    if not in_shell and given.get("type", "function") != "function":
        raise ChatError(f"field '{field}.type' must be \"function\"; other kinds of tools are not supported")
    shell, inner = (given, f"{field}.function") if in_shell else ({"type": "function"}, field)
    read_text_value(function.get("name"), f"{inner}.name")
    if function.get("description") is not None:
        read_text_value(function["description"], f"{inner}.description")
    if function.get("parameters") is not None:
        schema = _read_json(function["parameters"], f"{inner}.parameters", "a JSON schema")
        if not isinstance(schema, dict):
            raise ChatError(f"field '{inner}.parameters' must be an object or its JSON text, not {json_kind(schema)}")
        function = function | {"parameters": schema}
    for place, values in ((field, shell), (inner, function)):
        for name, one in values.items():
            if (place, name) != (field, "function"):
                check_depth(one, f"{place}.{name}")
    definition = shell | {"function": _without_null_properties(function)}
    format_json(definition, field)
    return Tool(definition=definition)


def _without_null_properties(value: Any, *, are_properties: bool = False) -> Any:
    """Drop nulls among the ``properties`` of a JSON schema, at any depth."""
    if isinstance(value, list):
        return [_without_null_properties(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_null_properties(one, are_properties=name == "properties" and not are_properties)
        for name, one in value.items()
        if one is not None or not are_properties
    }


def _read_json(value: object, field: str, wanted: str) -> object:
    """Return a value, or that of its JSON text."""
    if not isinstance(value, str):
        return value
    check_json_depth(value, field)
    try:
        parsed: object = json.loads(value)
    except ValueError:
        raise ChatError(f"field '{field}' is not valid JSON; give {wanted}") from None
    return parsed
