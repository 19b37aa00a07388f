"""Messages and tools of one record, checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from mcore_prefix_tree.data.json_fields import (
    ChatError,
    Text,
    check_depth,
    check_once,
    check_text,
    fault_of,
    format_json,
    read_json,
    shorten_json,
)
from mcore_prefix_tree.data.keys import is_named
from mcore_prefix_tree.data.stopping import STOP_KEYS, read_cut

# Names of an assistant's thinking, in data and in chat templates.
THINKING = ("reasoning_content", "reasoning", "thinking")
# Whether, and with which weight, an assistant message is trained on.
SWITCHES = ("loss", "weight", "train")
KEYS_OF_MESSAGES = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name", *THINKING, *SWITCHES, *STOP_KEYS}
)
# Patterns of other keys that change what is trained on, in one spelling, with the way out.
_OFF = "call it 'loss', with 0 for a message that is not trained on"
_REFUSED = {
    "function_call": "give it as tool_calls",
    "train(ing)?_detail": "give 'tokens' with a 'loss_mask'",
    "(loss|message|token|turn)_weight|loss_scale|weights": "call it 'weight'",
    "(step_)?loss_mask|train_mask|loss_flag|(compute|calculate|has|use)_loss|is_train|train_on_(turn|message)|supervised?|"
    "(is_)?trainable|training|trained(_on)?|(do|should)_train|learn(able)?": "call it 'loss'",
    "(is_)?masked|mask(_loss|_message)?|(ignore|no|skip)_loss|exclude_from_loss|ignored?|excluded?|no_train|"
    "skip_train(ing)?": _OFF,
}
# Other names of what a message says, which few chat templates read, by the names that are read here.
_SAID = {
    "content": "refusal",
    "reasoning_content": "analysis|chain_of_thought|reasoning_(details|text)|thinking_(blocks|content)|thoughts?",
}
_OF_CALLS = {"id", "type", "index", "function", "name", "arguments"}


class _Wire(BaseModel):
    """The keys of an object that are read."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @property
    def unread(self) -> dict[str, Any]:
        """The other keys."""
        return self.model_extra or {}


def _arguments(value: Any, info: ValidationInfo) -> Any:
    """Return the JSON text of a call's arguments; the context has the schemas of the tools."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"  # as engines read a call without arguments
    if isinstance(value, dict):
        schemas = info.context["schemas"] if info.context else {}
        return format_json(_without_absent(check_depth(value), schemas.get(info.data.get("name"))))
    if not isinstance(value, str):
        raise ValueError(f"must be an object or its JSON text, not {shorten_json(value)}")
    fault = "which is no JSON object, so that the text that the model wrote cannot be known; give token ids"
    parsed = read_json(check_text(value), fault)
    if isinstance(parsed, str):
        raise ValueError(f"is {shorten_json(value)}, {fault}")
    format_json(parsed)  # escapes may stop being text when a chat format decodes them
    return value


class ToolCall(_Wire):
    """One call the assistant made; ``id`` pairs it with its ``tool`` message, ``arguments`` is JSON text."""

    id: Text
    name: Text
    arguments: Annotated[Text, BeforeValidator(_arguments)]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, entry: Any, info: ValidationInfo) -> Any:
        """Return a call without OpenAI's shell, and with a number if it has no id."""
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise ValueError("must be an object with 'name' and 'arguments'")
        number = next(info.context["numbers"]) if info.context else 0
        unread = {key: one for key, one in (entry | function).items() if one is not None and key not in _OF_CALLS}
        call_id = f"call{number:05d}" if entry.get("id") is None else entry["id"]
        return unread | {"id": call_id, "name": function.get("name"), "arguments": function.get("arguments")}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model could call, as OpenAI's ``definition`` with the record's keys, values and order."""

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


class _Part(_Wire):
    """A part of a message's text."""

    type: Literal["text"]
    text: Text


_PARTS = TypeAdapter(list[_Part])


def _way_out(key: str) -> str | None:
    return next((way_out for pattern, way_out in _REFUSED.items() if is_named(key, pattern)), None)


def _joined(value: Any) -> Any:
    """Return the text of a message, whose parts are joined as chat templates write them."""
    if not isinstance(value, list):
        return value
    parts = _PARTS.validate_python(value)
    for name, one in chain.from_iterable(part.unread.items() for part in parts):
        if one is not None and (name in SWITCHES or _way_out(name)):
            raise ValueError(
                f"has a part with '{name}', but a message is trained on as a whole; give it to the message, or give "
                "'tokens' with a 'loss_mask'"
            )
    return "".join(part.text for part in parts)


_number = BeforeValidator(lambda value: float(value) if isinstance(value, bool) else value)
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False), _number]
_WEIGHTS = TypeAdapter(dict[str, _Weight], config=ConfigDict(strict=True))


class ChatMessage(_Wire):
    """One message."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    # Text of the message; empty for an assistant message that only calls tools.
    content: Annotated[Text, BeforeValidator(_joined)]
    tool_calls: tuple[ToolCall, ...] = Field((), strict=False)
    tool_call_id: Text | None = None  # of the call that a ``tool`` message answers; None if that call is raw text
    name: Text | None = None  # name of the function that answered, for a ``tool`` message, if the data names it
    # Thinking that an assistant message keeps apart from its content.
    thinking: Text = Field("", validation_alias=AliasChoices(*THINKING))
    # Weight of an assistant message's tokens in the loss; tokens with weight 0 are unscored.
    weight: _Weight = Field(1.0, validation_alias=AliasChoices(*SWITCHES))
    is_cut: bool = False  # whether a limit or a text stopped the model, which did not write the turn's last token
    stopped_by: str = ""  # text that stopped the model; a turn that ends with this very token was not cut
    others: dict[str, Any] = Field(default_factory=dict)  # other keys, for chat templates that read them

    @model_validator(mode="before")
    @classmethod
    def _read(cls, entry: Any, info: ValidationInfo) -> Any:
        """Return the fields of a record's message at the context's place; another one has them already."""
        if info.context is None:
            return entry
        if not isinstance(entry, dict):
            raise ValueError(f"must be an object with 'role' and 'content', not {shorten_json(entry)}")
        check_once(entry, info.context["place"])
        given = {key: one for key, one in entry.items() if one is not None}
        role, is_result = given.get("role"), given.get("role") == "tool"
        read = KEYS_OF_MESSAGES - (set() if is_result else {"name"})
        others = {key: one for key, one in given.items() if key not in read}
        thoughts = {key: given[key] for key in THINKING if given.get(key, "") != ""}
        weights = _WEIGHTS.validate_python({key: given[key] for key in SWITCHES if key in given})
        own = ("role", "content", "tool_calls", *(("tool_call_id", "name") if is_result else ()))
        fields = {key: given[key] for key in (*own, *list(thoughts)[:1], *list(weights)[:1]) if key in given}
        if role == "assistant":
            _check_said(others, thoughts, weights)
            cut = read_cut(entry, f"{info.context['place']}.")
            fields |= {"content": given.get("content", ""), "is_cut": cut is not None, "stopped_by": cut or ""}
        elif foreign := [key for key in ("tool_calls", *thoughts, *weights) if given.get(key) and key != "weight"]:
            raise ValueError(
                f"has '{foreign[0]}', but only a message of role 'assistant' calls tools, thinks and is trained on; "
                "remove it, or give 'tokens' with a 'loss_mask'"
            )
        return fields | {"others": others}


def _check_said(others: Mapping[str, Any], *given: Mapping[str, Any]) -> None:
    """Raise ValueError for keys of an assistant's message that change what is trained on, or differ from each other."""
    for name, value in others.items():
        way_out = _way_out(name)
        if way_out is not None and not isinstance(value, str) and (value or way_out != _OFF):
            raise ValueError(f"has '{name}', which changes what is trained on, and is not read: {way_out}")
    for values in given:
        if any(one != next(iter(values.values())) for one in values.values()):
            raise ValueError(f"has {' and '.join(values)}, which contradict each other; give one of them")


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
    context: dict[str, Any] = {"schemas": schemas, "numbers": count(1)}
    messages: list[ChatMessage] = []
    open_calls: list[ToolCall] = []
    nearest = None
    for index, entry in enumerate(value):
        context["place"] = place = f"messages[{index}]" if names is None else names[index]
        try:
            message = ChatMessage.model_validate(entry, context=context)
        except ValueError as error:
            raise fault_of(error, place) from None
        # An assistant message without a structured call had its call as text.
        if message.role == "tool" and (nearest is None or nearest.tool_calls):
            answered = _answered_call(message, place, open_calls)
            open_calls.remove(answered)
            message = message.model_copy(update={"tool_call_id": answered.id})
        elif message.role == "assistant":
            nearest = message
            open_calls += message.tool_calls
        messages.append(message)
    if nearest is None:
        name = "messages" if names is None else names[-1].partition("[")[0]
        raise ChatError(f"field '{name}' has no assistant message, so no token of it would be scored")
    return messages


def _answered_call(result: ChatMessage, place: str, open_calls: Sequence[ToolCall]) -> ToolCall:
    for call in open_calls:
        if result.tool_call_id == call.id or (result.tool_call_id is None and result.name in (None, call.name)):
            return call
    described = "" if result.tool_call_id is None else f" with id '{result.tool_call_id}'"
    described += "" if result.name is None else f" of '{result.name}'"
    raise ChatError(f"field '{place}' is a tool result, but no assistant message before it has an open call{described}")


def check_said(
    said: Mapping[str, Any], field: str, *, has_thinking: bool, is_read: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise ChatError for text of a scored message under a name which is neither read here nor by the chat template.

    ``said`` has the keys of the message that are not read; thinking that ``has_thinking`` repeats may be left.
    """
    for name in filter(said.get, said):
        ours = next((ours for ours, pattern in _SAID.items() if re.fullmatch(pattern, name)), None)
        if ours is not None and not (has_thinking and ours != "content") and not is_read(name):
            raise ChatError(
                f"field '{field}.{name}' is not read, so that the model would not be trained on it; call it '{ours}', "
                "or remove it"
            )


def unread_keys(messages: Sequence[ChatMessage], reads: Callable[[str], bool]) -> set[str]:
    """Return the keys of messages that neither this package nor a chat template ``reads``, as ``messages[].key``."""
    found = {f"messages[].{key}" for message in messages for key in message.others if key != "name"}
    calls = [call for message in messages for call in message.tool_calls]
    found |= {f"messages[].tool_calls[].{key}" for call in calls for key in call.unread}
    return {name for name in found if not reads(name.rpartition(".")[2])}


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
    try:
        value = read_json(value, "which is not valid JSON; give a list of tools") if isinstance(value, str) else value
    except ValueError as error:
        raise fault_of(error, "tools") from None
    if not isinstance(value, list):
        raise ChatError(f"field 'tools' must be a list, not {shorten_json(value)}")
    return [_tool(entry, f"tools[{index}]") for index, entry in enumerate(value)]


def _schema(value: Any) -> Any:
    """Return a JSON schema, from its text too."""
    value = read_json(value, "which is not valid JSON; give a JSON schema") if isinstance(value, str) else value
    if not isinstance(value, dict | None):
        raise ValueError(f"must be an object or its JSON text, not {shorten_json(value)}")
    return value


class _Function(_Wire):
    """The keys of a tool's function that are read; others are kept."""

    name: Text
    description: Text | None = None
    parameters: Annotated[Any, BeforeValidator(_schema)] = None


def _tool(entry: Any, place: str) -> Tool:
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    in_shell = "function" in given
    function = given["function"] if in_shell else {name: one for name, one in given.items() if name != "type"}
    if not isinstance(function, dict) or not given:
        raise ChatError(f"field '{place}' must be an object with 'name', 'description' and 'parameters'")
    if not in_shell and given.get("type", "function") != "function":
        raise ChatError(f"field '{place}.type' must be \"function\"; other kinds of tools are not supported")
    try:
        schema = _Function.model_validate(function).parameters
    except ValueError as error:
        raise fault_of(error, f"{place}.function" if in_shell else place) from None
    function = function if schema is None else function | {"parameters": schema}
    try:
        for one in (*function.values(), *(given | {"function": None}).values()):
            check_depth(one)
        definition = (given if in_shell else {"type": "function"}) | {"function": _without_null_properties(function)}
        format_json(definition)
    except ValueError as error:
        raise fault_of(error, place) from None
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
