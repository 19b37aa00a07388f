"""Chat conversations: the messages of one record, and the protocol of tokenizers that encode them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.chat_error import ChatError as ChatError
from mcore_prefix_tree.data.vocabulary import Vocabulary

# Keys of other formats that must not be dropped in silence, and what to give instead.
_UNKNOWN_TO_FORMATS = {
    "function_call": "give it as tool_calls",
    "reasoning_content": "write it into content, as the model did",
    "reasoning": "write it into content, as the model did",
    "thinking": "write it into content, as the model did",
    "weight": "give 'tokens' with a 'loss_mask'",
}
ROLES = ("system", "user", "assistant", "tool")

# Levels of objects and lists in arguments and tools. What encodes them calls itself for each level, so that without a
# limit a record would pass or fail with how deep the caller happens to be in calls of its own.
MAX_DEPTH = 64
_TOO_DEEP = f"field '{{field}}' is nested more than {MAX_DEPTH} levels deep; flatten or remove it"
# What JSON consists of, for text to be walked without decoding it.
_JSON = re.compile(
    r'[\s,:]*(?:"[^"\\]*(?:\\.[^"\\]*)*"|(?P<opens>[\[{])|(?P<closes>[\]}])|true|false|null|NaN|-?Infinity|[-+.\deE]+)',
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call the assistant made.

    Attributes:
        id: id that pairs the call with the ``tool`` message that answers it.
        name: name of the function called.
        arguments: JSON text (or whatever text the model produced in its place).
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model could call.

    Attributes:
        definition: ``{"type": "function", "function": {"name": ..., ...}}``, with the keys, the values and the order
            that the record has. Some chat formats write all of it, so that nothing may be added or lost.
    """

    definition: dict[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """``name`` and the record's other fields: mostly ``description`` and ``parameters``, a JSON schema."""
        function: dict[str, Any] = self.definition["function"]
        return function

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.function["name"])


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One message.

    Attributes:
        role: one of ``ROLES``.
        content: text of the message; empty for an assistant message that only calls tools.
        tool_calls: calls of an assistant message.
        tool_call_id: id of the call that a ``tool`` message answers.
        name: name of the function that answered, for a ``tool`` message, if the data names it.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTurn:
    """An assistant turn behind its whole history, as the model saw and continued it.

    Attributes:
        tokens: int32 ``[n]``. ``tokens[:start]`` is what the model was given; ``tokens[start:]`` is what it generated:
            its text, its tool calls and the end-of-turn token.
        start: index of the first generated token, ``0 < start < n``; 0 for text without a prompt, and n for a text that
            was cut before its first token.
    """

    tokens: npt.NDArray[np.int32]
    start: int


class ChatTokenizer(Protocol):
    """A tokenizer together with its chat format."""

    @property
    def name(self) -> str:
        """Argument of ``load_tokenizer``; for messages."""

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the token ids."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, control tokens included, for people to read."""

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        """Encode every assistant turn, in order; messages after the last one are not encoded.

        The turns of one conversation usually are prefixes of each other, but need not be: some chat formats rewrite
        the history as the conversation goes on. Messages and tools are those of ``parse_messages`` and ``parse_tools``.

        Raises:
            ChatError: the chat format cannot express the conversation or the tools.
        """

    def encode_completion(self, prompt: str, completion: str, *, ended: bool = True) -> EncodedTurn:
        """Encode a text and its continuation as one text, without a chat format, as TRL does.

        The tokens that the tokenizer writes before a text come once, also if the text begins with them. The
        end-of-sequence token comes once behind the continuation, and nowhere else. The continuation starts at the first
        token that the prompt by itself does not have.

        Args:
            prompt: text that the model was given.
            completion: text that it wrote, with or without the end-of-sequence token.
            ended: whether the model wrote the end-of-sequence token; without it, the continuation may be empty.

        Raises:
            ChatError: the continuation has no token, or the tokenizer has no end-of-sequence token.
        """

    def encode_text(self, text: str) -> list[int]:
        """Encode text without a chat format; no part of it becomes a control token."""

    def vocabulary(self) -> Vocabulary:
        """Return how each token is spelled.

        Raises:
            ValueError: the tokenizer does not expose the bytes of its tokens.
        """


def continuation(prompt: Sequence[int], whole: Sequence[int], *, ended: bool = True) -> EncodedTurn:
    """Return a text that starts where its tokens depart from those of its prompt; it may be empty if it did not end.

    The rule is that of ``common_prefix_length`` in TRL's ``data_utils.py``: tokens may merge across the border.
    """
    pairs = enumerate(zip(prompt, whole, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    if not whole or (ended and start == len(whole)):
        raise ChatError("the completion has no token of its own; leave the record out")
    return EncodedTurn(tokens=np.array(whole, dtype=np.int32), start=start)


def parse_messages(value: object, names: Sequence[str] | None = None) -> list[ChatMessage]:
    """Check the ``messages`` of a record and fill in what training data commonly leaves out.

    Tool calls come as ``{"name", "arguments"}`` or in OpenAI's shape ``{"id", "type", "function": {"name",
    "arguments"}}``; arguments as JSON text or as an object. A call without an id gets its ordinal in the conversation
    as the id (``call00001``, nine alphanumerics, which is what Mistral's formats want), so that rollouts which begin
    alike keep beginning alike. A tool result without ``tool_call_id`` answers the oldest open call (of its name, where
    it has one). Unknown keys are ignored, but for those that say what the model saw or what is trained on. Arguments
    are at most ``MAX_DEPTH`` levels deep. Content is text, or OpenAI's list of parts of text, which are joined.

    Args:
        value: list of messages.
        names: name of each message in its record, for errors; ``messages[0]`` and so on by default.

    Raises:
        ChatError: a message is malformed; names the field, such as ``messages[3].tool_calls[0].name``.
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
        if message.role == "tool":
            answered = _answered_call(entry, field, open_calls)
            open_calls.remove(answered)
            message = replace(message, tool_call_id=answered.id, name=entry.get("name"))
        messages.append(message)
    if not any(message.role == "assistant" for message in messages):
        name = "messages" if names is None else names[-1].partition("[")[0]
        raise ChatError(f"field '{name}' has no assistant message, so no token of it would be scored")
    return messages


def _message(entry: object, field: str, calls_seen: int) -> ChatMessage:
    """Return one message; a tool result does not name its call yet."""
    if not isinstance(entry, dict):
        raise ChatError(f"field '{field}' must be an object with 'role' and 'content', not {_kind(entry)}")
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        found = json.dumps(role) if isinstance(role, str) else _kind(role)
        raise ChatError(f"field '{field}.role' is {found}; roles are {', '.join(ROLES)}")
    for name, way_out in _UNKNOWN_TO_FORMATS.items():
        if entry.get(name) is not None:
            raise ChatError(f"field '{field}.{name}' changes what is trained on, and is not supported: {way_out}")
    tool_calls = _tool_calls(entry.get("tool_calls"), f"{field}.tool_calls", calls_seen)
    if tool_calls and role != "assistant":
        raise ChatError(f"field '{field}.tool_calls' belongs to an assistant message, not to role '{role}'")
    content = _content("" if content is None and tool_calls else content, f"{field}.content")
    if role == "assistant" and not content and not tool_calls:
        raise ChatError(f"field '{field}' is an assistant message with neither content nor tool_calls; remove it")
    return ChatMessage(role=role, content=content, tool_calls=tool_calls)


def _content(value: object, field: str) -> str:
    """Return the text of a message; its parts, if it has some, are joined as chat templates write them."""
    if not isinstance(value, list):
        return _text(value, field)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            found = f"of type {json.dumps(kind)}" if isinstance(kind, str) else _kind(part)
            raise ChatError(f"field '{field}[{index}]' is {found}; only parts of type \"text\" can be trained on")
        texts.append(_text(part.get("text"), f"{field}[{index}].text"))
    return "".join(texts)


def parse_tools(value: object) -> list[Tool]:
    """Check the ``tools`` of a record: the functions that the model could call.

    They are kept as they are, since chat formats write them out for the model to read: OpenAI's shape ``{"type",
    "function": {"name", ...}}`` with all its keys, nulls included. Two forms are unified: a function without that
    shell, ``{"name", ...}``, gets it, and a JSON schema in ``parameters`` that is JSON text becomes the object, as the
    list itself does. Each value is at most ``MAX_DEPTH`` levels deep.

    Raises:
        ChatError: a tool is malformed; names the field, such as ``tools[3].name``.
    """
    if value is None:
        return []
    if isinstance(value, str):
        if not value.strip():
            return []
        check_json_depth(value, "tools")
        try:
            value = json.loads(value)
        except ValueError:
            raise ChatError("field 'tools' is not valid JSON; give a list of tools") from None
    if not isinstance(value, list):
        raise ChatError(f"field 'tools' must be a list, not {_kind(value)}")
    return [_tool(entry, f"tools[{index}]") for index, entry in enumerate(value)]


def _tool(entry: object, field: str) -> Tool:
    shell = entry if isinstance(entry, dict) else {}
    in_shell = "function" in shell
    function = shell["function"] if in_shell else {name: one for name, one in shell.items() if name != "type"}
    if not isinstance(function, dict) or not shell:
        raise ChatError(f"field '{field}' must be an object with 'name', 'description' and 'parameters'")
    if not in_shell and shell.get("type", "function") != "function":
        raise ChatError(f"field '{field}.type' must be \"function\"; other kinds of tools are not supported")
    shell, inner = (shell, f"{field}.function") if in_shell else ({"type": "function"}, field)
    _text(function.get("name"), f"{inner}.name")
    if function.get("description") is not None:
        _text(function["description"], f"{inner}.description")
    if function.get("parameters") is not None:
        function = function | {"parameters": _schema(function["parameters"], f"{inner}.parameters")}
    _check_depths({name: one for name, one in shell.items() if name != "function"}, field)
    _check_depths(function, inner)
    definition = shell | {"function": function}
    _json_text(definition, field)
    return Tool(definition=definition)


def _schema(value: object, field: str) -> object:
    if isinstance(value, str):
        check_json_depth(value, field)
        try:
            value = json.loads(value)
        except ValueError:
            raise ChatError(f"field '{field}' is not valid JSON; give a JSON schema") from None
    if not isinstance(value, dict):
        raise ChatError(f"field '{field}' must be an object or its JSON text, not {_kind(value)}")
    return value


def _check_depths(values: dict[str, Any], field: str) -> None:
    for name, value in values.items():
        _check_depth(value, f"{field}.{name}")


def _check_depth(value: object, field: str) -> None:
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
        if depth <= 0:  # the value has ended; whatever follows makes it no JSON
            return


def _tool_calls(value: object, field: str, calls_seen: int) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ChatError(f"field '{field}' must be a list, not {_kind(value)}")
    calls = []
    for index, entry in enumerate(value):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise ChatError(f"field '{field}[{index}]' must be an object with 'name' and 'arguments'")
        name = _text(function.get("name"), f"{field}[{index}].name")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            _check_depth(arguments, f"{field}[{index}].arguments")
            arguments = _json_text(arguments, f"{field}[{index}].arguments")
        arguments = _text(arguments, f"{field}[{index}].arguments", expected="an object or its JSON text")
        check_json_depth(arguments, f"{field}[{index}].arguments")
        _check_escapes(arguments, f"{field}[{index}].arguments")
        call_id = entry.get("id")
        call_id = f"call{calls_seen + index + 1:05d}" if call_id is None else _text(call_id, f"{field}[{index}].id")
        calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
    return tuple(calls)


def _answered_call(entry: dict[str, object], field: str, open_calls: list[ToolCall]) -> ToolCall:
    call_id, name = entry.get("tool_call_id"), entry.get("name")
    described = ""
    if call_id is not None:
        described += f" with id '{_text(call_id, f'{field}.tool_call_id')}'"
    if name is not None:
        described += f" of '{_text(name, f'{field}.name')}'"
    for call in open_calls:
        if call_id == call.id or (call_id is None and name in (None, call.name)):
            return call
    raise ChatError(f"field '{field}' is a tool result, but no assistant message before it has an open call{described}")


def _text(value: object, field: str, expected: str = "a string") -> str:
    if not isinstance(value, str):
        raise ChatError(f"field '{field}' must be {expected}, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ChatError(
            f"field '{field}' has half of a surrogate pair at character {error.start}, which is not text; remove it"
        ) from None
    return value


def _check_escapes(arguments: str, field: str) -> None:
    """Refuse what is only text until somebody decodes the JSON, as chat formats do."""
    if "\\u" not in arguments:
        return
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return  # it stays text
    _json_text(decoded, field)


def _json_text(value: object, field: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # from a table: bytes, dates
        raise ChatError(f"field '{field}' cannot be written as JSON: {error}") from None
    return _text(text, field)


def _kind(value: object) -> str:
    """Return JSON's name for the type of ``value``."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
