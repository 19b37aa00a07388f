"""Hugging Face folders: every turn against apply_chat_template, with tokenizers and templates made here."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from harness.tokenizer_folders import CHATML, PLAIN, ROWS, THINKING, make_folder, needs_transformers, official
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.data import ChatError, load_tokenizer, parse_messages, parse_tools, read_samples
from mcore_prefix_tree.sample import SampleError

pytestmark = needs_transformers

# Only the answer is as it was written.
LAST_DIFFERS = (
    "{% for m in messages %}<|im_start|>"
    "{{ m.content if loop.last and not add_generation_prompt else m.content.strip() }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
NO_CONTINUATION = (
    "{% if add_generation_prompt %}ready?{% else %}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    "{% endif %}"
)
PROMPT_ENDS_WITH_SPACE = PLAIN.replace("assistant:", "assistant: ")


def template_messages(messages):
    converted = []
    for message in messages:
        calls = [{"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in message.tool_calls]
        converted.append({"role": message.role, "content": message.content, "tool_calls": calls})
    return converted


def official_tokens(tokenizer, messages, *, add_generation_prompt=False):
    encoded = tokenizer.apply_chat_template(
        template_messages(messages), tokenize=True, return_dict=True, add_generation_prompt=add_generation_prompt
    )
    return list(encoded["input_ids"])


def write_chat(tmp_path, rows):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": rows}))
    return path


VARIANTS = {
    "plain": {},
    "rstrip": {"rstrip": True},
    "lstrip": {"lstrip": True},
    "single word": {"single_word": True},
    "metaspace": {"prepend_space": True},
    "metaspace, lstrip": {"prepend_space": True, "lstrip": True},
    "prepend": {"prepend_always": True},
    "a longer token": {"joins": ["x<|im_start|>", "<|im_end|>\n"]},
}
TEMPLATES = {"chatml": CHATML, "no special tokens": PLAIN, "thinking": THINKING, "last differs": LAST_DIFFERS}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Ours and the official one, by template and variant."""

    def load(template, variant):
        if (template, variant) not in loaded:
            folder = make_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATES[template], **VARIANTS[variant])
            loaded[template, variant] = load_tokenizer(folder), official(folder)
        return loaded[template, variant]

    loaded = {}
    return load


def check_against_official(tokenizer, reference, messages):
    """Return how many turns were compared completely rather than by prompt: those whose answer joins the prompt."""
    turns = tokenizer.encode_turns(messages)
    indices = [i for i, message in enumerate(messages) if message.role == "assistant"]
    assert len(turns) == len(indices)
    compared = 0
    for turn, index in zip(turns, indices, strict=True):
        prompt = official_tokens(reference, messages[:index], add_generation_prompt=True)
        answered = official_tokens(reference, messages[: index + 1])
        assert turn.tokens[: turn.start].tolist() == prompt
        if answered[: len(prompt)] == prompt:
            compared += 1
            assert turn.tokens.tolist() == answered[: len(turn.tokens)]
            # A text that ends with the end-of-turn token ends the turn there.
            assert reference.decode(answered[len(turn.tokens) :]).replace("<|im_end|>", "").strip() == ""
    return compared


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_turn_is_the_official_encoding(tokenizers, template, variant):
    tokenizer, reference = tokenizers(template, variant)
    whole_turns = check_against_official(tokenizer, reference, parse_messages(ROWS))
    assert whole_turns == {
        ("last differs", "single word"): 1,  # next to a letter such a token is text and joins the letter
        ("thinking", "metaspace"): 3,  # the call's name is joined with the end of the prompt
        ("thinking", "metaspace, lstrip"): 3,
        ("thinking", "prepend"): 3,
    }.get((template, variant), 4)
    assert tokenizer.vocab_size == len(reference)


PIECES = ["<|im_start|>", "<|im_end|>", "<|im_", " ", "\n", "x", "a b", "look up", "\n\n", "</think>"]
CONTENT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("template", TEMPLATES)
@given(contents=st.lists(CONTENT, min_size=2, max_size=6))
def test_every_turn_of_any_text_is_the_official_encoding(tokenizers, template, variant, contents):
    rows = [{"role": ["user", "assistant"][at % 2], "content": content} for at, content in enumerate(contents)]
    with suppress(ChatError):  # text that strips or joins its neighbour
        check_against_official(*tokenizers(template, variant), parse_messages(rows))


@pytest.mark.parametrize("arguments", ["[7]", "7.5", "[]"])
def test_arguments_that_are_no_object_are_written_as_json(tmp_path, arguments):
    folder = make_folder(tmp_path / "tokenizer", CHATML)
    rows = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "find", "arguments": arguments}]},
        {"role": "tool", "content": "what?"},
        {"role": "assistant", "content": "oh"},
    ]
    first, _ = load_tokenizer(folder).encode_turns(parse_messages(rows))
    written = official(folder).decode(first.tokens[first.start :])
    assert written == f"<tool_call>find {arguments}</tool_call><|im_end|>"


def test_without_an_end_of_turn_token_the_newline_ends_the_turn(tmp_path):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    tokenizer, reference = load_tokenizer(folder), official(folder)
    turn = tokenizer.encode_turns(parse_messages(ROWS[:5]))[-1]
    assert reference.decode(turn.tokens[turn.start :]) == "  it is lost\n\n"


# Where a tokenizer joins line breaks, the model was given one and wrote the others.
BREAKS = (CHATML, {"joins": ("\n\n", "\n\n\n")}, "{}<|im_end|>")
BEHIND = [
    *((*BREAKS, content) for content in ("\nthe", "\n\nthe answer", "the")),
    *(
        (PROMPT_ENDS_WITH_SPACE, VARIANTS[variant], "user: go\nassistant: {}\n", content)
        for variant in ("plain", "metaspace", "prepend")
        for content in ("no", "nothing", " no", "\nno", "-")
    ),
]


@pytest.mark.parametrize(("template", "variant", "written", "content"), BEHIND)
def test_an_answer_is_written_behind_its_prompt(tmp_path, template, variant, written, content):
    """Also if it begins as the prompt ends, and with no space behind a prompt that ends in one."""
    folder = make_folder(tmp_path / "tokenizer", template, **variant)
    tokenizer, reference = load_tokenizer(folder), official(folder)
    messages = parse_messages([{"role": "user", "content": "go"}, {"role": "assistant", "content": content}])
    (turn,) = tokenizer.encode_turns(messages)
    assert turn.tokens[: turn.start].tolist() == official_tokens(reference, messages[:1], add_generation_prompt=True)
    shown = turn.tokens if written.startswith("user") else turn.tokens[turn.start :]
    assert reference.decode(shown) == written.format(content)


def test_a_tokenizer_that_cannot_write_behind_such_a_prompt(tmp_path):
    """Each text gets a space in front, and text that could stand before the answer joins it."""
    folder = make_folder(tmp_path / "tokenizer", PROMPT_ENDS_WITH_SPACE, prepend_always=True, joins=["\nn", ":n"])
    rows = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "no"}]
    path = write_chat(tmp_path, rows)
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=load_tokenizer(folder))
    assert str(caught.value).startswith(
        f"{path}:1: field 'messages[1]' begins with characters that tokenizer '{folder}' joins with its generation "
        "prompt, and cannot write apart from it; "
    )


def test_template_renders_tools(tmp_path):
    told = "{% for t in tools or [] %}<tool>{{ t.function.name }} {{ t.function.parameters | tojson }}{% endfor %}"
    tokenizer = load_tokenizer(make_folder(tmp_path / "tokenizer", told + CHATML))
    tools = parse_tools([{"name": "find", "parameters": {"type": "object"}}])
    for turn, untold in zip(*(tokenizer.encode_turns(parse_messages(ROWS), one) for one in (tools, [])), strict=True):
        assert tokenizer.decode(turn.tokens) == '<tool>find {"type": "object"}' + tokenizer.decode(untold.tokens)
        assert len(turn.tokens) - turn.start == len(untold.tokens) - untold.start


def two_turns(first, second):
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": first}]
    return [*rows, {"role": "user", "content": "c"}, {"role": "assistant", "content": second}]


def test_a_template_that_removes_reasoning(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path / "tokenizer", THINKING))
    path = write_chat(tmp_path, two_turns("<think>hm</think>b", "d"))
    assert len(read_samples(path, tokenizer=tokenizer, expand_turns=True)) == 2
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=tokenizer)
    assert str(caught.value).startswith(f"{path}:1: field 'messages' cannot be one sample")
    assert "rewrites the history after turn 0; set data.expand_turns" in str(caught.value)


def test_history_with_equal_text_and_other_tokens(tmp_path):
    """The first answer was written behind a line break, and with it is one token of the history."""
    folder = make_folder(tmp_path / "tokenizer", CHATML, joins=("\n\n",))
    path = write_chat(tmp_path, two_turns("\nb", "d"))
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=load_tokenizer(folder))
    assert str(caught.value) == (
        f"{path}:1: field 'messages' cannot be one sample, because tokenizer '{folder}' writes the same text of the "
        "history in other tokens after turn 0; set data.expand_turns, or use a tokenizer that keeps it, such as "
        "mistral-v7"
    )


def test_template_with_answers_that_do_not_continue_its_prompt(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path / "tokenizer", NO_CONTINUATION))
    with pytest.raises(ChatError, match=r"field 'messages\[2\]' does not continue its generation prompt"):
        tokenizer.encode_turns(parse_messages(ROWS))


FAULTY = {
    "{{ raise_exception('system messages are not supported') }}": "system messages are not supported",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ range(10 ** 9) }}": "OverflowError: Range too big",
    "{{ {}.popitem() }}": "is unsafe",
    "{{ '{x}'.format() }}": "KeyError: 'x'",
    "{{ '{0}'.format() }}": "IndexError: ",
    "{{ '%s %s' % ('a',) }}": "TypeError: not enough arguments",
    "{{ 'a'.index('b') }}": "ValueError: substring not found",
    "{{ messages[0].content.foo.bar }}": "has no attribute 'foo'",
    "{{ messages[9].role }}": "has no element 9",
    "{% macro deeper() %}{{ deeper() }}{% endmacro %}{{ deeper() }}": "RecursionError: ",
}


@pytest.mark.parametrize("template", FAULTY)
def test_a_template_that_fails(tmp_path, template):
    folder = make_folder(tmp_path / "tokenizer", template)
    path = write_chat(tmp_path, ROWS)
    with pytest.raises(SampleError, match=FAULTY[template]) as caught:
        read_samples(path, tokenizer=load_tokenizer(folder))
    start = f"{path}:1: field 'messages' does not fit the chat template of tokenizer '{folder}': "
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "word"),
    [
        ("{% set today = strftime_now('%d %b %Y') %}", "strftime_now"),
        ("{%- if strftime_now is defined -%}{{ strftime_now('%Y') }}{% endif %}", "strftime_now"),
        ("{{ lipsum(1) }}", "lipsum"),
        ("{{ [1, 2] | random }}", "random"),
    ],
)
def test_a_template_that_makes_something_else_each_time_is_refused(tmp_path, head, word):
    folder = make_folder(tmp_path / "tokenizer", head + CHATML)
    with pytest.raises(ValueError, match=f"has a chat template that uses '{word}', which makes other tokens of the"):
        load_tokenizer(folder)


TODAY = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
)


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        ({"strftime_now": "2026-11-20"}, "20 Nov 2026<"),
        ({"date_string": "26 Jul 2024"}, "26 Jul 2024<"),
        ({"date_string": "1 Jan", "strftime_now": "2026-11-20"}, "1 Jan<"),
        ({"date_string": "", "enable_thinking": True}, "think<"),
        ({"date_string": "", "enable_thinking": False}, "<"),
    ],
)
def test_template_receives_its_arguments_and_the_date(tmp_path, given, starts):
    head = TODAY + "{{ 'think' if enable_thinking }}"
    tokenizer = load_tokenizer(make_folder(tmp_path / "tokenizer", head + CHATML), given)
    assert tokenizer.decode(tokenizer.encode_turns(parse_messages(ROWS))[0].tokens).startswith(starts)


@pytest.mark.parametrize("head", ["\n", "  ", "", "\n\n  x"])
def test_clock_does_not_change_the_rest_of_a_template(tmp_path, head):
    """Blanks at its start too, some of which blocks take with them."""
    plain, clock = head + "{% if 1 %}\n{% set day = '20' %}{{ day }}{% endif %}" + CHATML, "strftime_now('%d')"
    tokenizers = [
        load_tokenizer(make_folder(tmp_path / "plain", plain)),
        load_tokenizer(make_folder(tmp_path / "told", plain.replace("'20'", clock)), {"strftime_now": "2026-11-20"}),
    ]
    told = [tokenizer.encode_turns(parse_messages(ROWS)) for tokenizer in tokenizers]
    assert [turn.tokens.tolist() for turn in told[0]] == [turn.tokens.tolist() for turn in told[1]]


def test_unknown_keywords_of_a_template(tmp_path):
    folder = make_folder(tmp_path / "tokenizer", CHATML)
    with pytest.raises(ValueError, match="chat_template_kwargs has 'tokenize', which is not a template variable"):
        load_tokenizer(folder, {"tokenize": True})
    with pytest.raises(ValueError, match="chat_template_kwargs: strftime_now is 'today'; give a date as 2026-11-20"):
        load_tokenizer(folder, {"strftime_now": "today"})
    with pytest.raises(
        ValueError, match=r"chat_template_kwargs \(a, b\) are for the chat template of a Hugging Face tok"
    ):
        load_tokenizer("mistral-v7", {"a": 1, "b": 2})
    path = write_chat(tmp_path, ROWS)
    reads = load_tokenizer(make_folder(tmp_path / "reads", "{{ strftime_now('%Y') }}" + CHATML), {"date_string": "x"})
    with pytest.raises(
        SampleError, match="it reads the clock: chat_template_kwargs has no strftime_now, as 2026-11-20"
    ):
        read_samples(path, tokenizer=reads)


def test_words_that_only_look_like_a_clock(tmp_path):
    head = "{# strftime_now #}strftime_now {{ 'lipsum' }}{{ messages[0].strftime_now }}{% set random = 1 %}{{ random }}"
    tokenizer = load_tokenizer(make_folder(tmp_path / "tokenizer", head + CHATML))
    assert tokenizer.decode(tokenizer.encode_turns(parse_messages(ROWS))[0].tokens).startswith("strftime_now lipsum1<")


def test_folders_that_are_refused(tmp_path):
    for name, template, says in (
        ("open", CHATML + "{{ 'open }}", "has a chat template that cannot be parsed: "),
        ("none", None, r"has no chat template; add chat_template\.jinja"),
    ):
        folder = make_folder(tmp_path / name, template)
        with pytest.raises(ValueError, match=says):
            load_tokenizer(folder)
    with pytest.raises(ValueError, match="transformers cannot load this folder: "):
        load_tokenizer(str(tmp_path))


def rewritten(folder, name, change):
    """Change one JSON file of a folder."""
    path = Path(folder) / name
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(added_tokens=[]) or content["model"].update(vocab={}, merges=[]),
        lambda content: content["model"].update(vocab={}, merges=[]),
        lambda content: content["model"].update(vocab={"<unk>": 0}, merges=[], unk_token="<unk>"),
        lambda content: content.update(model={"type": "WordLevel", "vocab": {"<|im_end|>": 0}, "unk_token": "?"}),
        lambda content: content.update(normalizer={"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": ""}),
    ],
    ids=["all", "vocabulary", "only unknown", "words", "normalizer"],
)
def test_folder_that_makes_nothing_of_text_is_refused(tmp_path, change):
    folder = rewritten(make_folder(tmp_path / "folder", CHATML), "tokenizer.json", change)
    with pytest.raises(ValueError, match=r"^tokenizer '.*folder' (makes (nothing|unknown|control)|: transformers)"):
        load_tokenizer(str(folder))


def test_tokenizer_of_few_words_is_accepted(tmp_path):
    words = {"<|im_start|>": 0, "<|im_end|>": 1, "?": 2, "ᚠᚢᚦ": 3}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
    changes = {"model": model, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    folder = make_folder(tmp_path / "folder", CHATML)
    rewritten(folder, "tokenizer.json", lambda content: content.update(changes))
    assert load_tokenizer(folder).encode_text("ᚠᚢᚦ") == [3]


BEYOND = [
    ("tokenizer.json", 2**31, lambda content: content["added_tokens"][0].update(id=2**31)),
    ("tokenizer.json", 2**31, lambda content: content["model"]["vocab"].update(far=2**31)),
    ("tokenizer.json", 2**32 - 1, lambda content: content["model"]["vocab"].update(far=2**32 - 1)),
    (
        "tokenizer_config.json",
        2**31,
        lambda content: content.update(added_tokens_decoder={str(2**31): {"content": "<|far|>", "special": True}}),
    ),
]


@pytest.mark.parametrize(("name", "token_id", "change"), BEYOND)
def test_a_token_beyond_int32_is_refused(tmp_path, name, token_id, change):
    folder = rewritten(make_folder(tmp_path / "tokenizer", CHATML), name, change)
    with pytest.raises(ValueError, match=f"its token '.*' has the id {token_id}; token ids are 0 to 2147483647"):
        load_tokenizer(folder)


@pytest.fixture
def with_code(tmp_path):
    """A folder with a module that would leave a file behind."""
    folder = make_folder(tmp_path / "tokenizer", CHATML)
    (Path(folder) / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    return folder


@pytest.mark.parametrize(
    ("name", "auto_map"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", None]}),
        ("tokenizer_config.json", ["own.Own", None]),
        ("config.json", {"AutoTokenizer": ["own.Own", None]}),
    ],
)
def test_warning_says_that_a_folders_code_is_not_run(with_code, tmp_path, name, auto_map):
    rewritten(with_code, name, lambda content: content.update(auto_map=auto_map))
    with pytest.warns(UserWarning, match=f"the 'auto_map' of its {name} names custom code, which is not run"):
        tokenizer = load_tokenizer(with_code)
    assert tokenizer.vocab_size > 256
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_needs_its_code_is_refused_by_name(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # a person at a terminal would be asked, or a job answers
    change = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    rewritten(with_code, "tokenizer_config.json", lambda content: content.update(change))
    with pytest.raises(ValueError, match=r"of its tokenizer_config\.json names custom code, which is never run"):
        load_tokenizer(with_code)
    assert not (tmp_path / "ran").exists()


def test_model_code_is_not_tokenizer_code(with_code, recwarn):
    rewritten(with_code, "config.json", lambda content: content.update(auto_map={"AutoConfig": "own.Own"}))
    load_tokenizer(with_code)
    assert not [one for one in recwarn if "auto_map" in str(one.message)]
