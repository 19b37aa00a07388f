"""Chat messages as they are found in the wild, and the errors that name their faults."""

import json

import pytest

from mcore_prefix_tree.data import ChatError, ChatMessage, Tool, ToolCall, parse_messages, parse_tools


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


def test_results_with_call_ids_may_come_in_any_order():
    messages = parse_messages(
        [
            assistant(tool_calls=[call("f", id="x"), call("g", id="y"), call("h", id="z")]),
            tool(name="g"),
            tool(tool_call_id="z"),
            tool(),
        ]
    )
    assert [m.tool_call_id for m in messages[1:]] == ["y", "z", "x"]


FOREIGN = (
    ", but only a message of role 'assistant' calls tools, thinks and is trained on; remove it, or give 'tokens' with "
    "a 'loss_mask'"
)
BAD = {
    "no list": ("hello", "field 'messages' must be a list of at least one chat message"),
    "text": (["hi"], "field 'messages[0]' must be an object with 'role' and 'content', not \"hi\""),
    "role": (
        [{"role": "bot", "content": "x"}],
        "field 'messages[0].role' must be 'system', 'developer', 'user', 'assistant' or 'tool', not \"bot\"",
    ),
    "no role": ([{"content": "x"}], "field 'messages[0].role' is missing"),
    "no content": ([{"role": "user"}], "field 'messages[0].content' is missing"),
    "content parts": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "field 'messages[0].content[0].text' is missing",
    ),
    "surrogate": (
        json.loads(r'[{"role": "user", "content": "ab\ud83d"}]'),
        "field 'messages[0].content' has half of a surrogate pair at character 2, which is not text; remove it",
    ),
    "nothing scored": (
        [{"role": "user", "content": "hi"}],
        "field 'messages' has no assistant message, so no token of it would be scored",
    ),
    "calls of a user": (
        [{"role": "user", "content": "hi", "tool_calls": [call()]}],
        "field 'messages[0]' has 'tool_calls'" + FOREIGN,
    ),
    "calls no list": ([assistant(tool_calls={})], "field 'messages[0].tool_calls' must be a list, not {}"),
    "call no object": (
        [assistant(tool_calls=["f()"])],
        "field 'messages[0].tool_calls[0]' must be an object with 'name' and 'arguments'",
    ),
    "call name": (
        [assistant(tool_calls=[call(), call(name=3)])],
        "field 'messages[0].tool_calls[1].name' must be a valid string, not 3",
    ),
    "call arguments": (
        [assistant(tool_calls=[call(arguments=3)])],
        "field 'messages[0].tool_calls[0].arguments' must be an object or its JSON text, not 3",
    ),
    "call arguments that decode to no text": (
        [assistant(tool_calls=[call(arguments='{"a": "\\ud800"}')])],
        "field 'messages[0].tool_calls[0].arguments' has half of a surrogate pair at character 7, which is not text; "
        "remove it",
    ),
    **{
        name: (
            [assistant(content="hi", **{name: value})],
            f"field 'messages[0]' has '{name}', which changes what is trained on, and is not read: {way_out}",
        )
        for name, value, way_out in [
            ("function_call", {"name": "f"}, "give it as tool_calls"),
            ("train_detail", [{"begin_offset": 0}], "give 'tokens' with a 'loss_mask'"),
            ("mask", [1], "call it 'loss', with 0 for a message that is not trained on"),
        ]
    },
    "result of nothing": (
        [{"role": "user", "content": "hi"}, tool()],
        "field 'messages[1]' is a tool result, but no assistant message before it has an open call",
    ),
    "switches that contradict each other": (
        [assistant(content="hi", loss=True, train=0)],
        "field 'messages[0]' has loss and train, which contradict each other; give one of them",
    ),
    "a switch that is text": (
        [assistant(content="hi", train="no")],
        "field 'messages[0].train' must be a valid number, not \"no\"",
    ),
    "a negative weight": (
        [assistant(content="hi", weight=-1)],
        "field 'messages[0].weight' must be greater than or equal to 0, not -1",
    ),
    "a weight that no number of the model's is": (
        [assistant(content="hi", weight=10**400)],
        "field 'messages[0].weight' must be a valid number, not 1000000000000000000000000000000000000...",
    ),
    "a user's second switch": (
        [{"role": "user", "content": "hi", "loss": False, "weight": "x"}, assistant(content="hi")],
        "field 'messages[0].weight' must be a valid number, not \"x\"",
    ),
    "a user's switch": (
        [{"role": "user", "content": "hi", "loss": 1}, assistant(content="hi")],
        "field 'messages[0]' has 'loss'" + FOREIGN,
    ),
    "two thoughts": (
        [assistant(content="hi", reasoning="a", thinking="b")],
        "field 'messages[0]' has reasoning and thinking, which contradict each other; give one of them",
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
        "field 'messages[1].tool_call_id' must be a valid string, not 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_name_the_field(case):
    value, message = BAD[case]
    with pytest.raises(ChatError) as caught:
        parse_messages(value)
    assert str(caught.value) == message


SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}}


def test_the_shapes_of_a_tool_are_one():
    plain = {"name": "find", "description": "It finds.", "parameters": SCHEMA}
    expected = {"type": "function", "function": plain}
    for given in (
        plain,
        {"type": "function", **plain},
        expected,
        plain | {"parameters": json.dumps(SCHEMA)},
        {"type": "function", "function": plain | {"parameters": json.dumps(SCHEMA)}},
    ):
        (tool,) = parse_tools([given])
        assert tool == Tool(definition=expected)
        assert list(tool.function) == list(plain)
        assert tool.name == "find"
    assert parse_tools(None) == parse_tools([]) == []


def test_nothing_is_added_to_a_tool_or_lost():
    given = [
        {"function": {"parameters": {"default": None}, "name": "f", "strict": None, "x": [None]}, "type": "function"},
        {"function": {"name": "g", "description": None, "parameters": None}, "id": 3},
    ]
    assert json.dumps([tool.definition for tool in parse_tools(given)]) == json.dumps(given)
    (bare,) = parse_tools([{"name": "now", "strict": True}])
    assert bare.definition == {"type": "function", "function": {"name": "now", "strict": True}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "field 'tools' must be a list, not {}"),
        ([3], "field 'tools[0]' must be an object with 'name', 'description' and 'parameters'"),
        ([{"function": None}], "field 'tools[0]' must be an object with 'name', 'description' and 'parameters'"),
        ([{"function": {"name": 1}}], "field 'tools[0].function.name' must be a valid string, not 1"),
        (
            [{"type": "web_search", "name": "f"}],
            "field 'tools[0].type' must be \"function\"; other kinds of tools are not supported",
        ),
        ([{"name": "f"}, {"description": "x"}], "field 'tools[1].name' is missing"),
        ([{"name": "f", "description": 1}], "field 'tools[0].description' must be a valid string, not 1"),
        ([{"name": "f", "parameters": 3}], "field 'tools[0].parameters' must be an object or its JSON text, not 3"),
        (
            [{"name": "f", "parameters": "{"}],
            "field 'tools[0].parameters' is \"{\", which is not valid JSON; give a JSON schema",
        ),
    ],
)
def test_bad_tools_name_the_field(value, message):
    with pytest.raises(ChatError) as caught:
        parse_tools(value)
    assert str(caught.value) == message
