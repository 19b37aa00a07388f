"""The tools of a record: chat formats receive them unchanged, and errors name tools that a format cannot write."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.util import find_spec

import pytest
from data_sources import CharacterTokenizer, write_table
from harness.tokenizer_folders import CHATML, make_folder, needs_transformers, official
from mistral_common.protocol.instruct.request import ChatCompletionRequest

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import ChatError, load_tokenizer, parse_messages, parse_tools, read_samples
from mcore_prefix_tree.data.json_fields import MAX_DEPTH

# A Tekken vocabulary takes a second to load.
tokenizer_of = cache(load_tokenizer)

MISTRAL = ["mistral-v3", "mistral-v3-tekken", "mistral-v7"]
ROWS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# Whose schemas say null, for example pydantic's; and fields that are omitted, null, empty or in another order.
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "enum": ["x", None]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "It finds.",
            "parameters": {"type": "object", "properties": {"q": OPTIONAL}},
            "strict": True,
        },
    },
    {"function": {"description": None, "name": "now"}, "type": "function"},
    {"type": "function", "function": {"name": "all", "parameters": None}},
    {"type": "function", "function": {"name": "any", "parameters": {}}},
]
TELLING = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML


def write_lines(folder, **fields):
    path = folder / "tools.jsonl"
    path.write_text(json.dumps({"messages": ROWS, **fields}))
    return path


class Recorder(CharacterTokenizer):
    def __init__(self):
        super().__init__()
        self.told = []

    def encode_turns(self, messages, tools=()):
        self.told.append([tool.definition for tool in tools])
        return super().encode_turns(messages)


@needs_transformers
def test_templates_receive_the_records_tools(tmp_path):
    tools = [*TOOLS, {"type": "function", "strict": None, "function": {"name": "f", "return": {"type": "null"}}}]
    folder = make_folder(tmp_path / "tokenizer", TELLING)
    tokenizer = load_tokenizer(folder)
    (sample,) = read_samples(write_lines(tmp_path, tools=tools), tokenizer=tokenizer)
    rendered = official(folder).apply_chat_template(ROWS, tools=tools, tokenize=False)
    assert '"default": null' in rendered
    assert '"strict": true' in rendered
    assert tokenizer.decode(sample.tokens) == rendered.rstrip("\n")


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral_tools_equal_mistral_commons_conversion(name, tmp_path):
    tokenizer = tokenizer_of(name)
    (sample,) = read_samples(write_lines(tmp_path, tools=TOOLS), tokenizer=tokenizer)
    request = ChatCompletionRequest.from_openai(messages=ROWS, tools=TOOLS)
    assert sample.tokens.tolist() == tokenizer._tokenizer.encode_chat_completion(request).tokens
    assert '"default": null' in tokenizer.decode(sample.tokens)


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (
            {"type": "function", "function": {"name": "f", "return": {}}},
            "field 'tools[0]' has the key 'return', which the chat format of tokenizer 'mistral-v7' cannot write, only "
            "name, description, parameters",
        ),
        ({"name": "f", "cache_control": None}, "field 'tools[0]' has the key 'cache_control', which"),
        ({"type": "function", "function": {"name": "f"}, "id": 3}, "field 'tools[0]' has the key 'id', which"),
        ({"name": "f g"}, "field 'tools' does not fit the chat format"),
        ({"name": "f", "parameters": {"type": 3}}, "field 'tools' does not fit the chat format"),
        ({"type": "x", "function": {"name": "f"}}, "field 'tools[0]' does not fit the chat format"),
        ({"name": "f", "strict": "very"}, "field 'tools[0]' does not fit the chat format"),
    ],
)
def test_mistral_names_unsupported_tools(tool, says, tmp_path):
    path = write_lines(tmp_path, tools=[tool])
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=tokenizer_of("mistral-v7"))
    assert str(caught.value).startswith(f"{path}:1: {says}")
    assert "\n" not in str(caught.value)


def test_nulls_of_a_table_are_missing_keys(tmp_path):
    """But those inside of JSON text, and those in lists, are the record's own."""
    properties = {"q": {"type": "string", "enum": ["x", None]}}
    tools = [
        {"name": "find", "parameters": {"type": "object", "properties": properties, "required": ["q"]}, "strict": True},
        {"name": "now", "parameters": {"maximum": [1, 2]}},
    ]
    text = [{"name": "find", "parameters": json.dumps(TOOLS[0]["function"]["parameters"])}]
    told = []
    for number, one in enumerate((tools, text)):
        recorder = Recorder()
        path = write_table(tmp_path, [{"messages": ROWS, "tools": one}], "parquet", name=str(number))
        read_samples(path, tokenizer=recorder)
        told += recorder.told[0]
    schema = TOOLS[0]["function"]["parameters"]
    assert [tool["function"] for tool in told] == [*tools, {"name": "find", "parameters": schema}]


def nested(levels, kind="object"):
    value = {}
    for _ in range(levels - 1):
        value = {"a": value} if kind == "object" else [value]
    return value


def called(arguments):
    call = {"name": "f", "arguments": arguments}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


DEEP = {
    "brackets": called("[" * 1500),
    "text": called(json.dumps(nested(MAX_DEPTH + 1))),
    "object": called(nested(MAX_DEPTH + 1)),
    "lists": called({"a": nested(MAX_DEPTH, "list")}),
    "900 levels": called(json.dumps(nested(900))),
}


@pytest.mark.parametrize("case", DEEP)
def test_arguments_that_are_too_deep_are_refused(case):
    with pytest.raises(ChatError) as caught:
        parse_messages(DEEP[case])
    assert str(caught.value) == (
        "field 'messages[1].tool_calls[0].arguments' is nested more than 64 levels deep; flatten or remove it"
    )


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"name": "f", "parameters": nested(MAX_DEPTH + 1)}, "tools[0]"),
        ({"name": "f", "parameters": json.dumps(nested(900))}, "tools[0].parameters"),
        ({"function": {"name": "f", "strict": nested(900)}}, "tools[0]"),
        ({"function": {"name": "f"}, "type": nested(900, "list")}, "tools[0]"),
    ],
)
def test_tools_that_are_too_deep_are_refused(tool, field):
    with pytest.raises(ChatError) as caught:
        parse_tools([tool])
    assert str(caught.value) == f"field '{field}' is nested more than 64 levels deep; flatten or remove it"


def from_deep_inside(levels, function):
    return function() if levels == 0 else from_deep_inside(levels - 1, function)


TOKENIZERS = [*MISTRAL, pytest.param("folder", marks=needs_transformers)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tokenizer"), TELLING) if find_spec("transformers") else None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whether_a_record_passes_does_not_depend_on_the_callers_depth(name, folder):
    tokenizer = tokenizer_of(folder if name == "folder" else name)
    whole = nested(MAX_DEPTH)
    tools = [{"name": "f", "parameters": whole}]
    tool_result = {"role": "tool", "content": json.dumps(whole)}
    rows = [*called(whole), tool_result, {"role": "assistant", "content": "ok"}]

    def encode():
        return [turn.tokens.tolist() for turn in tokenizer.encode_turns(parse_messages(rows), parse_tools(tools))]

    room = sys.getrecursionlimit()
    assert from_deep_inside(1, encode) == from_deep_inside(room // 2, encode)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("case", ["brackets", "900 levels"])
def test_records_that_are_too_deep_are_skipped(case, name, folder, tmp_path):
    path = write_lines(tmp_path)
    path.write_text(json.dumps({"messages": DEEP[case]}) + "\n" + path.read_text())
    tokenizer = tokenizer_of(folder if name == "folder" else name)
    with pytest.warns(UserWarning, match=r":1: field 'messages\[1\]\.tool_calls\[0\]\.arguments' is nested more than"):
        (sample,) = read_samples(path, tokenizer=tokenizer, on_error="skip")
    assert tokenizer.decode(sample.tokens[sample.loss_mask > 0]).strip().startswith("b")


@pytest.mark.parametrize(
    "record",
    [
        {"tokens": [1], "temperature": ...},
        {"tokens": [...]},
        {"tokens": [1], "loss_mask": [...]},
        {"tokens": [1], "merge_key": [...]},
        {"tokens": [1], "reward": ...},
        {"tokens": [1], "group": ...},
        {"tokens": [1], "advantage": ...},
        {"tokens": [1], "teacher": ...},
        {"messages": [{"role": ..., "content": "a"}]},
        {"messages": [{"role": "user", "content": ...}]},
        {"messages": called(...)},
        {"messages": ROWS, "tools": [{"name": "f", "parameters": ...}]},
        {"messages": ROWS, "tools": [{"function": {"name": "f"}, "type": ...}]},
        {"messages": ROWS, "tools": [{"name": "f", "type": ...}]},
    ],
)
def test_no_record_that_can_just_be_read_is_too_deep_for_its_error(record, tmp_path):
    """Lists of every depth from one that is read to one that is not."""
    outside, inside = json.dumps(record, default=lambda _: "...").split('"..."')
    depths = range(sys.getrecursionlimit() - 250, sys.getrecursionlimit())
    lines = [f"{outside}{'[' * depth}{']' * depth}{inside}\n" for depth in depths]
    path = tmp_path / "deep.jsonl"
    path.write_text("".join([*lines, '{"tokens": [1]}\n']))
    with pytest.warns(UserWarning, match=f"{len(lines)} "):
        assert len(read_samples(path, tokenizer=CharacterTokenizer(), on_error="skip")) == 1


@pytest.mark.parametrize("text", ["{x: 1", "Found: " + "[" * 99, '"text"', "[]" * 99])
def test_arguments_that_are_no_json_are_refused(text):
    with pytest.raises(ChatError, match=r"tool_calls\[0\].arguments' is .* no JSON object.*; give token ids"):
        parse_messages(called(text))


def test_nulls_that_the_tools_schema_lacks_are_dropped():
    properties = {"x": {"type": "integer"}, "at": {"type": "object", "properties": {"n": {}}}, "text": None}
    tools = parse_tools([{"name": "f", "parameters": {"type": "object", "properties": properties}}])
    assert "text" not in tools[0].function["parameters"]["properties"]
    for tools_given, right in ((tools, {"x": None, "at": {"n": None}}), ([], None)):
        given = {"x": None, "text": None, "y": None, "at": {"n": None, "m": None}}
        calls = [{"name": "f", "arguments": given}]
        (message,) = parse_messages([{"role": "assistant", "tool_calls": calls}], tools=tools_given)
        assert json.loads(message.tool_calls[0].arguments) == (given if right is None else right)


@pytest.mark.parametrize("name", MISTRAL)
@pytest.mark.parametrize("content", ["[" * 1500, json.dumps(nested(900))], ids=["brackets", "levels"])
def test_results_are_json_to_v3_only(content, name):
    tokenizer = tokenizer_of(name)
    messages = parse_messages(
        [*called("{}"), {"role": "tool", "content": content}, {"role": "assistant", "content": "k"}]
    )
    if name == "mistral-v7":
        assert content in tokenizer.decode(tokenizer.encode_turns(messages)[-1].tokens)
    else:
        with pytest.raises(ChatError, match=r"^field 'messages\[2\]\.content' is nested more than 64 levels deep"):
            tokenizer.encode_turns(messages)
    assert len(tokenizer.encode_turns(messages[:3])) == 1  # messages after the last turn are not encoded
