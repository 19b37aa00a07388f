"""Chat messages as they are found in the wild, and the errors that name what is wrong with them."""

import json

import pytest

from mcore_prefix_tree.data import ChatError, ChatMessage, ToolCall, parse_messages


def assistant(**rest):
    return {"role": "assistant", "content": None, **rest}


def call(name="f", arguments="{}", **rest):
    return {"name": name, "arguments": arguments, **rest}


def tool(content="ok", **rest):
    return {"role": "tool", "content": content, **rest}


def test_the_two_shapes_of_a_tool_call_are_one():
    flat = assistant(tool_calls=[{"id": "a1", "name": "find", "arguments": {"city": "Zürich"}}])
    nested = assistant(
        tool_calls=[{"id": "a1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Zürich"}'}}]
    )
    assert parse_messages([flat]) == parse_messages([nested])
    (message,) = parse_messages([flat])
    assert message == ChatMessage(
        role="assistant", content="", tool_calls=(ToolCall(id="a1", name="find", arguments='{"city": "Zürich"}'),)
    )


def test_missing_ids_are_ordinals_and_results_answer_in_order():
    messages = parse_messages(
        [
            {"role": "user", "content": "go", "time": 3},
            assistant(content="looking", tool_calls=[call("f"), call("g")]),
            tool("one"),
            tool("two", name="g"),
            assistant(tool_calls=[call("f")]),
            tool("three"),
        ]
    )
    assert [c.id for m in messages for c in m.tool_calls] == ["call00001", "call00002", "call00003"]
    assert [m.tool_call_id for m in messages if m.role == "tool"] == ["call00001", "call00002", "call00003"]
    assert messages[3].name == "g"


def test_results_may_come_in_any_order_when_they_say_what_they_answer():
    messages = parse_messages(
        [
            assistant(tool_calls=[call("f", id="x"), call("g", id="y"), call("h", id="z")]),
            tool(name="g"),
            tool(tool_call_id="z"),
            tool(),
        ]
    )
    assert [m.tool_call_id for m in messages[1:]] == ["y", "z", "x"]


BAD = {
    "no list": ("hello", "field 'messages' must be a list of at least one chat message"),
    "empty": ([], "field 'messages' must be a list of at least one chat message"),
    "text": (["hi"], "field 'messages[0]' must be an object with 'role' and 'content', not a string"),
    "role": (
        [{"role": "bot", "content": "x"}],
        "field 'messages[0].role' is \"bot\"; roles are system, user, assistant, tool",
    ),
    "no role": ([{"content": "x"}], "field 'messages[0].role' is null; roles are system, user, assistant, tool"),
    "no content": ([{"role": "user"}], "field 'messages[0].content' must be a string, not null"),
    "content parts": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "field 'messages[0].content' must be a string, not a list",
    ),
    "surrogate": (
        json.loads(r'[{"role": "user", "content": "ab\ud83d"}]'),
        "field 'messages[0].content' has half of a surrogate pair at character 2, which is no text; remove it",
    ),
    "silent assistant": (
        [assistant(content="")],
        "field 'messages[0]' is an assistant message with neither content nor tool_calls; remove it",
    ),
    "null assistant": ([assistant()], "field 'messages[0].content' must be a string, not null"),
    "nothing scored": (
        [{"role": "user", "content": "hi"}],
        "field 'messages' has no assistant message, so no token of it would be scored",
    ),
    "calls of a user": (
        [{"role": "user", "content": "hi", "tool_calls": [call()]}],
        "field 'messages[0].tool_calls' belongs to an assistant message, not to role 'user'",
    ),
    "calls no list": ([assistant(tool_calls={})], "field 'messages[0].tool_calls' must be a list, not an object"),
    "call no object": (
        [assistant(tool_calls=["f()"])],
        "field 'messages[0].tool_calls[0]' must be an object with 'name' and 'arguments'",
    ),
    "function no object": (
        [assistant(tool_calls=[{"function": "f"}])],
        "field 'messages[0].tool_calls[0]' must be an object with 'name' and 'arguments'",
    ),
    "call name": (
        [assistant(tool_calls=[call(), call(name=3)])],
        "field 'messages[0].tool_calls[1].name' must be a string, not a number",
    ),
    "call arguments": (
        [assistant(tool_calls=[{"name": "f"}])],
        "field 'messages[0].tool_calls[0].arguments' must be an object or its JSON text, not null",
    ),
    "call id": (
        [assistant(tool_calls=[call(id=True)])],
        "field 'messages[0].tool_calls[0].id' must be a string, not a boolean",
    ),
    "result of nothing": (
        [assistant(content="hi"), tool()],
        "field 'messages[1]' is a tool result, but no assistant message before it has an open call",
    ),
    "second result": (
        [assistant(tool_calls=[call()]), tool(), tool(name="f")],
        "field 'messages[2]' is a tool result, but no assistant message before it has an open call of 'f'",
    ),
    "result of another": (
        [assistant(tool_calls=[call(id="x")]), tool(tool_call_id="y")],
        "field 'messages[1]' is a tool result, but no assistant message before it has an open call with id 'y'",
    ),
    "result id": (
        [assistant(tool_calls=[call()]), tool(tool_call_id=1)],
        "field 'messages[1].tool_call_id' must be a string, not a number",
    ),
    "result name": (
        [assistant(tool_calls=[call()]), tool(name=[])],
        "field 'messages[1].name' must be a string, not a list",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_name_the_field(case):
    value, message = BAD[case]
    with pytest.raises(ChatError) as caught:
        parse_messages(value)
    assert str(caught.value) == message
