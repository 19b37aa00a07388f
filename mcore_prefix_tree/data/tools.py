"""Tools of a record, and the calls that an assistant message makes of them."""

from __future__ import annotations

import json

from mcore_prefix_tree.data.chat import Tool, ToolCall
from mcore_prefix_tree.data.json_fields import (
    ChatError,
    check_depth,
    check_depths,
    check_escapes,
    check_json_depth,
    format_json,
    json_kind,
    read_text_value,
)


def parse_tools(value: object) -> list[Tool]:
    """Check the ``tools`` of a record: the functions that the model could call.

    They are kept as they are, since chat formats write them out for the model to read: OpenAI's shape ``{"type",
    "function": {"name", ...}}`` with all its keys, nulls included. Two forms are unified: a function without that
    shell, ``{"name", ...}``, gets it, and a JSON schema in ``parameters`` that is JSON text becomes the object, as the
    list itself does. Each value is at most ``MAX_DEPTH`` levels deep.

    Raises:
        ChatError: a tool is malformed; names the field, for example ``tools[3].name``.
    """
    if value is None:
        return []
    if isinstance(value, str):
        if not value.strip():
            return []
        value = _parse(value, "tools", "a list of tools")
    if not isinstance(value, list):
        raise ChatError(f"field 'tools' must be a list, not {json_kind(value)}")
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
    read_text_value(function.get("name"), f"{inner}.name")
    if function.get("description") is not None:
        read_text_value(function["description"], f"{inner}.description")
    if function.get("parameters") is not None:
        function = function | {"parameters": _schema(function["parameters"], f"{inner}.parameters")}
    check_depths({name: one for name, one in shell.items() if name != "function"}, field)
    check_depths(function, inner)
    definition = shell | {"function": function}
    format_json(definition, field)
    return Tool(definition=definition)


def _parse(text: str, field: str, wanted: str) -> object:
    check_json_depth(text, field)
    try:
        parsed: object = json.loads(text)
    except ValueError:
        raise ChatError(f"field '{field}' is not valid JSON; give {wanted}") from None
    return parsed


def _schema(value: object, field: str) -> object:
    if isinstance(value, str):
        value = _parse(value, field, "a JSON schema")
    if not isinstance(value, dict):
        raise ChatError(f"field '{field}' must be an object or its JSON text, not {json_kind(value)}")
    return value


def parse_tool_calls(value: object, field: str, calls_seen: int) -> tuple[ToolCall, ...]:
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
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}  # as engines read a call without arguments
        if isinstance(arguments, dict):
            check_depth(arguments, f"{field}[{index}].arguments")
            arguments = format_json(arguments, f"{field}[{index}].arguments")
        arguments = read_text_value(arguments, f"{field}[{index}].arguments", expected="an object or its JSON text")
        check_json_depth(arguments, f"{field}[{index}].arguments")
        check_escapes(arguments, f"{field}[{index}].arguments")
        call_id = entry.get("id")
        call_id = (
            f"call{calls_seen + index + 1:05d}" if call_id is None else read_text_value(call_id, f"{field}[{index}].id")
        )
        calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
    return tuple(calls)
