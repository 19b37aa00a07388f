"""The Mistral tokenizers against mistral-common's own encodings of every history and every answered history."""

import json
import sys
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.protocol.instruct import messages as mistral
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall
from mistral_common.protocol.instruct.tool_calls import Tool as MistralTool
from mistral_common.protocol.instruct.tool_calls import ToolCall as MistralToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from mcore_prefix_tree.data import (
    DEFAULT_TOKENIZER,
    ChatError,
    load_tokenizer,
    parse_messages,
    parse_tools,
    read_samples,
)
from mcore_prefix_tree.sample import SampleError

# A Tekken vocabulary takes a second to load.
tokenizer_of = cache(load_tokenizer)

OFFICIAL = {
    "mistral-v3": MistralTokenizer.v3,
    "mistral-v3-tekken": lambda: MistralTokenizer.v3(is_tekken=True),
    "mistral-v7": MistralTokenizer.v7,
}

ROLLOUT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather in Oslo and in Bergen?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": '{"city":"Oslo"}'}]},
    {"role": "tool", "content": '{"sky":"grey"}', "name": "weather"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": {"city": "Bergen"}}]},
    {"role": "tool", "content": "", "name": "weather"},
    {"role": "assistant", "content": "Oslo is grey; for Bergen there is no report."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def loaded():
    return {name: tokenizer_of(name) for name in OFFICIAL}


@pytest.fixture(scope="module")
def official():
    return {name: load() for name, load in OFFICIAL.items()}


def official_tokens(tokenizer, messages, tools=None):
    """mistral-common's encoding of ``messages``, written independently of the code under test."""
    converted = []
    for message in messages:
        if message.role == "system":
            converted.append(mistral.SystemMessage(content=message.content))
        elif message.role == "user":
            converted.append(mistral.UserMessage(content=message.content))
        elif message.role == "tool":
            converted.append(
                mistral.ToolMessage(content=message.content, tool_call_id=message.tool_call_id, name=message.name)
            )
        else:
            calls = [
                MistralToolCall(id=c.id, function=FunctionCall(name=c.name, arguments=c.arguments))
                for c in message.tool_calls
            ]
            converted.append(mistral.AssistantMessage(content=message.content or None, tool_calls=calls or None))
    # Below validation: in serving mode a request must not end with an answer, in fine-tuning mode it must.
    normalized = tokenizer._instruct_request_normalizer.from_chat_completion_request(
        ChatCompletionRequest(messages=converted, tools=tools)
    )
    return tokenizer.instruct_tokenizer.encode_instruct(normalized).tokens


def check_against_official(tokenizer, official, messages):
    turns = tokenizer.encode_turns(messages)
    roles = ["", *(message.role for message in messages), ""]
    starts = [i for i in range(len(messages)) if roles[i] != "assistant" and roles[i + 1] == "assistant"]
    ends = [i + 1 for i in range(len(messages)) if roles[i + 1] == "assistant" and roles[i + 2] != "assistant"]
    assert len(turns) == len(starts)
    for turn, start, end in zip(turns, starts, ends, strict=True):
        assert turn.tokens.tolist() == official_tokens(official, messages[:end])
        assert turn.tokens[: turn.start].tolist() == official_tokens(official, messages[:start])


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_turn_is_the_official_encoding(name, official):
    check_against_official(tokenizer_of(name), official[name], parse_messages(ROLLOUT))


def test_content_with_a_call_and_parallel_calls(tokenizer, official):
    rows = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "and"},
        {"role": "user", "content": "now?"},
        {"role": "assistant", "content": "Done"},
        {"role": "assistant", "content": "indeed."},
    ]
    messages = parse_messages(rows)
    check_against_official(tokenizer, official["mistral-v7"], messages)
    assert len(tokenizer.encode_turns(messages)) == 2  # the format merges the last two messages into one turn


TOOLS = [{"name": "find", "description": "It finds.", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize("name", OFFICIAL)
def test_tools_equal_the_official_encoding(name, official):
    tokenizer, messages, tools = tokenizer_of(name), parse_messages(ROLLOUT), parse_tools(TOOLS)
    told = [MistralTool(function=Function(**TOOLS[0]))]
    turns = tokenizer.encode_turns(messages, tools)
    plain = tokenizer.encode_turns(messages)
    roles = [message.role for message in messages]
    ends = [i + 1 for i in range(len(roles)) if roles[i] == "assistant" and roles[i + 1 : i + 2] != ["assistant"]]
    for turn, untold, end in zip(turns, plain, ends, strict=True):
        assert turn.tokens.tolist() == official_tokens(official[name], messages[:end], told)
        assert turn.tokens[turn.start :].tolist() == untold.tokens[untold.start :].tolist()
        assert turn.start > untold.start
    assert "find" in official[name].decode(turns[0].tokens[: turns[0].start].tolist())


TEXT = st.text(max_size=30) | st.sampled_from(
    ["[/INST]", "</s>", "<s>[INST] hi [/INST]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[/SYSTEM_PROMPT]", "<unk>", "  "]
)


def call(name):
    return {"name": name, "arguments": "{}"}


@st.composite
def conversations(draw):
    rows = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        rows.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            rows.append({"role": "assistant", "content": draw(TEXT), "tool_calls": [call(draw(st.sampled_from("ab")))]})
            rows.append({"role": "tool", "content": draw(TEXT)})
        rows.append({"role": "assistant", "content": draw(TEXT.filter(bool))})
    return parse_messages(rows)


@given(messages=conversations())
def test_text_that_imitates_control_tokens_does_not_move_the_turns(tokenizer, official, messages):
    check_against_official(tokenizer, official["mistral-v7"], messages)


@st.composite
def any_conversations(draw):
    """Messages in any order that parse: some of them no chat format has."""
    rows = []
    open_calls = 0
    for _ in range(draw(st.integers(1, 8))):
        kinds = ["system", "user", "user", "assistant", "assistant", "calls", *(["tool"] * 4 if open_calls else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "calls":
            calls = [call(name) for name in draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=2))]
            content = draw(st.sampled_from([None, None, None, "look"]))
            rows.append({"role": "assistant", "content": content, "tool_calls": calls})
            open_calls += len(calls)
        else:
            content = draw(st.sampled_from(["hi", "</s>", "[/INST]", '{"a":1}', " "]))
            rows.append({"role": kind, "content": content})
            open_calls -= kind == "tool"
    return parse_messages([*rows, {"role": "assistant", "content": "bye"}])


def one_by_one(tokenizer, messages, tools):
    """Each turn's tokens and start, from a separate encoding."""
    roles = [message.role for message in messages]
    ends = [i + 1 for i in range(len(roles)) if roles[i] == "assistant" and roles[i + 1 : i + 2] != ["assistant"]]
    converted = tokenizer._convert(messages)
    told = [tokenizer._told(tool, "tools") for tool in tools]
    turns = [tokenizer._turns(tokenizer._encode(converted[:end], told or None))[-1] for end in ends]
    return [(turn.tokens.tolist(), turn.start) for turn in turns]


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["untold", "told"])
@pytest.mark.parametrize("name", OFFICIAL)
@given(messages=any_conversations())
def test_turns_encoded_together_equal_turns_encoded_separately(loaded, name, tools, messages):
    tokenizer, tools = loaded[name], parse_tools(tools)
    try:
        expected = one_by_one(tokenizer, messages, tools)
    except ChatError:
        if tools or name != "mistral-v7":
            with pytest.raises(ChatError):
                tokenizer.encode_turns(messages, tools)
        return
    assert [(turn.tokens.tolist(), turn.start) for turn in tokenizer.encode_turns(messages, tools)] == expected


@pytest.mark.parametrize("name", OFFICIAL)
def test_turns_behind_one_user_message_are_encoded_once(name, monkeypatch):
    tokenizer = tokenizer_of(name)
    encode, encoded = tokenizer._encode, []
    monkeypatch.setattr(tokenizer, "_encode", lambda *given: encoded.append(given) or encode(*given))
    steps = [{"role": "assistant", "content": None, "tool_calls": [call("f")]}, {"role": "tool", "content": "ok"}]
    rows = [{"role": "user", "content": "go"}, *steps * 9, {"role": "assistant", "content": "done"}]
    messages = parse_messages([*rows, *rows, {"role": "user", "content": "bye"}])
    assert len(tokenizer.encode_turns(messages, parse_tools(TOOLS))) == 20
    assert [len(given[0]) for given in encoded] == [20, 40]


def test_scored_tokens_decode_to_the_assistants_text(tokenizer, official, tmp_path):
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps({"messages": ROLLOUT}))
    decode = official["mistral-v7"].decode
    end_of_turn = official["mistral-v7"].instruct_tokenizer.tokenizer.eos_id
    expanded = read_samples(path, tokenizer=tokenizer, expand_turns=True)
    turns = []
    for sample in expanded:
        scored = sample.tokens[sample.loss_mask > 0].tolist()
        assert scored[-1] == end_of_turn
        assert sample.tokens[-len(scored) :].tolist() == scored
        turns.append(decode(scored))
    assert turns == [
        '[{"name": "weather", "arguments": {"city": "Oslo"}, "id": "call00001"}]',
        '[{"name": "weather", "arguments": {"city": "Bergen"}, "id": "call00002"}]',
        "Oslo is grey; for Bergen there is no report.",
        "You are welcome.",
    ]
    (whole,) = read_samples(path, tokenizer=tokenizer)
    assert whole.tokens.tolist() == expanded[-1].tokens.tolist()
    assert whole.tokens[whole.loss_mask > 0].tolist() == [t for s in expanded for t in s.tokens[s.loss_mask > 0]]
    assert decode(whole.tokens.tolist()).endswith("You are welcome.")  # no trace of the last user message


def test_call_ids_the_format_allows_are_kept_and_others_replaced(tokenizer, official):
    def rollout(first, second):
        rows = [{"role": "user", "content": "go"}]
        for call_id in (first, second):
            rows.append({"role": "assistant", "content": None, "tool_calls": [{"id": call_id, **call("f")}]})
            rows.append({"role": "tool", "content": "ok", "tool_call_id": call_id})
        return parse_messages([*rows, {"role": "assistant", "content": "done"}])

    def decoded(messages):
        return official["mistral-v7"].decode(tokenizer.encode_turns(messages)[-1].tokens.tolist())

    assert decoded(rollout("AbCdEf123", "zyxwvu987")).count("AbCdEf123") == 2  # the call and its result
    renamed = decoded(rollout("toolu_01", "toolu_01"))  # some frameworks use one id again and again
    assert (renamed.count("call00001"), renamed.count("call00002"), renamed.count("toolu")) == (2, 2, 0)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": [call("f")]},
                {"role": "user", "content": "never mind"},
                {"role": "assistant", "content": "ok"},
            ],
            "Not the same number of function calls and responses",
        ),
        (
            [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call("a b")]}],
            "Function name was a b",
        ),
    ],
)
def test_format_errors_give_the_reason(tokenizer, rows, reason):
    with pytest.raises(ChatError) as caught:
        tokenizer.encode_turns(parse_messages(rows))
    assert str(caught.value).startswith("field 'messages' does not fit the chat format of tokenizer 'mistral-v7': ")
    assert reason in str(caught.value)


def test_names_and_sizes(tokenizer):
    assert (tokenizer.name, tokenizer.vocab_size) == (DEFAULT_TOKENIZER, 32768)
    assert (tokenizer_of("mistral-v3").name, tokenizer_of("mistral-v3").vocab_size) == ("mistral-v3", 32768)
    with pytest.raises(ValueError, match="'gpt-5' is neither a folder nor one of mistral-v3, mistral-v3-tekken, "):
        load_tokenizer("gpt-5")


def test_transformers_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as caught:
        load_tokenizer(str(tmp_path))
    assert str(caught.value) == (
        f"tokenizer '{tmp_path}' is a Hugging Face folder, which needs transformers: "
        "pip install 'transformers<5.24,>=4.56'"
    )


ASKED = "<s>[INST] two[/INST]"


def user(text):
    return {"role": "user", "content": text}


def said(text, **keys):
    return {"role": "assistant", "content": text, **keys}


MARKED = {
    "off": (
        [user("two"), said("four", loss=0), user("more"), said("five")],
        ["{asked} four</s>", "{asked} four</s>[INST] more[/INST][[ five</s>]]"],
    ),
    "cut": ([user("two"), said("four", finish_reason="length")], ["{asked}[[ four]]</s>"]),
    "empty": ([user("two"), said("")], ["{asked}[[</s>]]"]),
    "empty in the history": (
        [user("two"), said(""), user("more"), said("five", weight=1)],
        ["{asked}[[</s>]]", "{asked}</s>[INST] more[/INST][[ five</s>]]"],
    ),
}


@pytest.mark.parametrize("case", MARKED)
@pytest.mark.parametrize("name", ["mistral-v3", "mistral-v7"])
def test_turns_are_scored_as_they_were_written(loaded, tmp_path, name, case):
    rows, expected = MARKED[case]
    tokenizer, path = loaded[name], tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": rows}))
    marked = []
    for sample in read_samples(path, tokenizer=tokenizer, expand_turns=True):
        tokens, scored = sample.tokens.tolist(), np.flatnonzero(sample.loss_mask).tolist()
        start, end = (scored[0], scored[-1] + 1) if scored else (len(tokens), len(tokens))
        inner = f"[[{tokenizer.decode(tokens[start:end])}]]" if scored else ""
        marked.append(tokenizer.decode(tokens[:start]) + inner + tokenizer.decode(tokens[end:]))
    assert marked == [text.format(asked=ASKED) for text in expected]


UNWRITTEN = {
    "thought": ([user("a"), said("b", thought="c")], "'messages[1].thought' is not read, so that the model would"),
    "thinking": ([user("a"), said("b", reasoning="c")], "'messages[1]' has thinking apart from its content"),
    "an answer to text": (
        [user("a"), said("f()"), {"role": "tool", "content": "1"}, said("b")],
        "'messages[2]' answers a call that is text",
    ),
    "an answer to text, after a call with an empty id": (
        [
            user("a"),
            {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "1", "tool_call_id": ""},
            said("f()"),
            {"role": "tool", "content": "1"},
            said("b"),
        ],
        "'messages[4]' answers a call that is text",
    ),
    "an answer to text, with an id": (
        [user("a"), said("f()"), {"role": "tool", "content": "1", "tool_call_id": "x"}, said("b")],
        "'messages[2]' answers a call that is text",
    ),
    "an empty message in a turn": ([user("a"), said("b"), said("")], "'messages[2]' is an empty assistant message"),
    "half a turn": ([user("a"), said("b", loss=0), said("c")], "is one turn with the assistant messages behind it in"),
}


@pytest.mark.parametrize("case", UNWRITTEN)
def test_messages_outside_the_format_are_rejected(loaded, tmp_path, case):
    rows, message = UNWRITTEN[case]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": rows}))
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=loaded["mistral-v7"])
    assert message in str(caught.value)
