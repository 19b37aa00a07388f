"""The assistant mask: tokens of random conversations against transformers, scored spans against authorship.

Each rule has examples too. ``[[...]]`` marks scored text.
"""

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
from chat_conversations import (
    CUT_KEYS,
    REASONING_NAMES,
    SWITCHES,
    WHOLE_KEYS,
    conversations,
    expected_turns,
    pieces_of_turn,
    rendered,
    switches,
)
from harness.chat_families import BY_NAME, FAMILIES
from harness.commands import write_rows
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.data import load_tokenizer, parse_messages, read_samples, turn_texts
from mcore_prefix_tree.data.chat_template import ChatTemplates
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.sample import SampleError

transformers = pytest.importorskip("transformers")

EVERY_FAMILY = pytest.mark.parametrize("name", [family.name for family in FAMILIES])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Family, our tokenizer and transformers' own, by the family's name; changes make another folder."""

    def load(name, *, template_kwargs=None, **changes):
        key = name, str(template_kwargs), str(changes)
        if key not in loaded:
            family = type(BY_NAME[name])(**(vars(BY_NAME[name]) | changes))
            folder = family.make(tmp_path_factory.mktemp(name))
            official = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            loaded[key] = family, load_tokenizer(folder, template_kwargs), official
        return loaded[key]

    loaded = {}
    return load


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Read records as a JSONL file."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"

    def samples(tokenizer, *records, expand=False, **options):
        write_rows(path, records)
        return read_samples(path, tokenizer=tokenizer, expand_turns=expand, **options)

    return samples


# Random conversations


@EVERY_FAMILY
@given(data=st.data())
def test_script_writes_the_templates_text(made, name, data):
    family, _, official = made(name)
    case = data.draw(conversations(family))
    whole = "".join(piece.text for piece in family.script(case.messages, case.tools))
    assert whole == rendered(family, official, case.messages, case.tools, tokenize=False)
    for turn in case.turns:
        prompt, answer, stop, added = pieces_of_turn(family, case, turn)
        history = case.messages[: turn.at]
        shown = rendered(family, official, history, case.tools, tokenize=False, add_generation_prompt=True)
        assert prompt.startswith(shown)
        assert prompt[len(shown) :] in ("", "<think>\n\n</think>\n\n", "\n</think>\n\n", "\n<think></think>")
        answered = rendered(family, official, case.messages[: turn.at + 1], case.tools, tokenize=False)
        assert answered == prompt + answer + ("" if family.ended_by_next else stop) + added


@EVERY_FAMILY
@given(data=st.data())
def test_every_turn_scores_the_models_text(made, read, name, data):
    family, tokenizer, official = made(name)
    case = data.draw(conversations(family))
    samples = read(tokenizer, case.record, expand=True)
    expected = expected_turns(family, official, case)
    assert [sample.source.rpartition(" turn ")[2] for sample in samples] == [str(at) for at in range(len(expected))]
    for sample, right, turn in zip(samples, expected, case.turns, strict=True):
        check(sample, right.tokens, right.mask, open_end=turn.open_end)


@EVERY_FAMILY
@given(data=st.data())
def test_conversation_scores_every_turn_or_is_refused(made, read, name, data):
    family, tokenizer, official = made(name)
    case = data.draw(conversations(family))
    expected = [right for right in expected_turns(family, official, case) if any(right.mask)]
    if not expected:
        return  # nothing is lost if it is refused, nor if it is not
    whole = expected[-1]
    written = [right.tokens[: 1 + max(at for at, weight in enumerate(right.mask) if weight)] for right in expected]
    if not all(official.decode(whole.tokens).startswith(official.decode(tokens)) for tokens in written):
        with pytest.raises(SampleError, match="cannot be one sample"):
            read(tokenizer, case.record)
        return
    if not all(tokens == whole.tokens[: len(tokens)] for tokens in written):
        return  # the same text in other tokens
    mask = [0.0] * len(whole.tokens)
    for right in expected:
        for at, weight in enumerate(right.mask):
            mask[at] = weight or mask[at]
    (sample,) = read(tokenizer, case.record)
    check(sample, whole.tokens, mask, open_end=True)


def check(sample, tokens, mask, *, open_end):
    """Compare a sample with expected tokens and mask; ``open_end`` allows missing tokens after the last scored one."""
    found, weights = sample.tokens.tolist(), sample.loss_mask.tolist()
    shortest = len(tokens) if not open_end else max((at + 1 for at, weight in enumerate(mask) if weight), default=1)
    assert found == tokens[: max(len(found), shortest)]
    assert weights == mask[: len(weights)]


# Each rule by example


def marked(tokenizer, sample):
    """Return the text of a sample, ``[[`` and ``]]`` around scored spans."""
    pairs = zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True)
    runs = [(on, [token for token, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1] != 0)]
    return "".join(f"[[{tokenizer.decode(ids)}]]" if on else tokenizer.decode(ids) for on, ids in runs)


@pytest.fixture
def shown(made, read):
    """Texts of the samples of records or of one conversation, with marks around scored spans."""

    def texts(name, *records, expand=False, **changes):
        _, tokenizer, _ = made(name, **changes)
        given = [record if isinstance(record, dict) else {"messages": record} for record in records]
        return [marked(tokenizer, sample) for sample in read(tokenizer, *given, expand=expand)]

    return texts


def user(content, **keys):
    return {"role": "user", "content": content, **keys}


def said(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def tool(content, **keys):
    return {"role": "tool", "content": content, **keys}


def call(**arguments):
    return [{"name": "find", "arguments": arguments}]


CHATML_ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
GLM_ASKED = "[gMASK]<sop><|user|>\na<|assistant|>\n<think></think>"
INSERTED = "<think>\n\n</think>\n\n"
# The template of the case reported, which inserts no thinking.
PLAIN_GLM = (
    "[gMASK]<sop>{%- for m in messages -%}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' }}"
    "{{- m.content }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)
TWICE = [user("a"), said("b"), user("c"), said("d")]
GLM_TWICE = GLM_ASKED + "[[\nb<|user|>]]\nc<|assistant|>\n<think></think>[[\nd<|user|>]]"
GLM_TURNS = [GLM_ASKED + "[[\nb<|user|>]]", GLM_ASKED + "\nb<|user|>\nc<|assistant|>\n<think></think>[[\nd<|user|>]]"]
CUT = [user("a"), said("b", finish_reason="length"), user("c"), said("d")]
THOUGHT = [user("a"), said("b", reasoning_content="c")]
RAW = '<tool_call>\n{"name": "get", "arguments": {"k": "a"}}\n</tool_call>'
CALLED = [user("a"), said(RAW), tool("va"), said("done")]
TO_TOOL = "<|im_end|>\n<|im_start|>user\n<tool_response>\nva\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant"
PHI_ASKED = "<|user|>\na<|end|>\n<|assistant|>\n"
# Family, a conversation or a record, its texts, and changes of the family; ``turns`` expands them.
EXAMPLES = {
    # Rules 1 and 2: the sample ends with the token that stopped the model, not with text behind it.
    "phi, turns": ("phi", TWICE, [
        PHI_ASKED + "[[b<|end|>]]", PHI_ASKED + "b<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n[[d<|end|>]]"]),
    "phi": ("phi", TWICE, [PHI_ASKED + "[[b<|end|>]]\n<|user|>\nc<|end|>\n<|assistant|>\n[[d<|end|>]]"]),
    "the first of two stop tokens": ("chatml", [user("a"), said("b<|im_end|>")], [CHATML_ASKED + "[[b<|im_end|>]]"]),
    "tokens that close a call": ("deepseek", [user("a"), said("b", tool_calls=call(k=1)), tool("c"), said("d")], [
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>[[b<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find"
        '<｜tool▁sep｜>{"k": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>]]<｜tool▁output▁begin｜>c'
        "<｜tool▁output▁end｜>[[d<｜end▁of▁sentence｜>]]"]),
    "llama's own stop of a call": ("llama", [user("a"), said("", tool_calls=call(k=1)), tool("c"), said("d")], [
        LLAMA + '<|end_header_id|>\n\n[[{"name": "find", "parameters": {"k": 1}}<|eom_id|>]]<|start_header_id|>ipython'
        "<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[d<|eot_id|>]]"]),
    # Rule 3: the next role's token stops the model.
    "glm": ("glm", TWICE, [GLM_TWICE]), "glm_listed": ("glm_listed", TWICE, [GLM_TWICE]),
    "glm, turns": ("glm", TWICE, GLM_TURNS), "glm_listed, turns": ("glm_listed", TWICE, GLM_TURNS),
    "without thinking": ("glm", [*TWICE[:3], said("<tool_call>x"), tool("y"), said("e")], [
        "[gMASK]<sop><|user|>\na<|assistant|>\n[[b<|user|>]]\nc<|assistant|>\n[[<tool_call>x<|observation|>]]\n"
        "y<|assistant|>\n[[e<|user|>]]"], {"template": PLAIN_GLM}),
    "only listed stops": ("glm", [user("a"), said("", tool_calls=call()), tool("b"), said("c")], [
        GLM_ASKED + "[[\n<tool_call>find\n</tool_call>]]<|observation|>\n"
        "<tool_response>\nb\n</tool_response><|assistant|>\n<think></think>[[\nc<|user|>]]"],
        {"stops": ("<|endoftext|>", "<|user|>")}),
    # Rule 4: a cut turn in the middle leaves the others.
    "cut": ("chatml", CUT, [
        CHATML_ASKED + "[[b]]<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[d<|im_end|>]]"]),
    "cut, glm": ("glm", CUT, [GLM_ASKED + "[[\nb]]<|user|>\nc<|assistant|>\n<think></think>[[\nd<|user|>]]"]),
    # Rule 6: an empty thinking block that the template inserts is prompt, and one that the data writes is answer.
    "qwen": ("qwen3", TWICE[:2], [CHATML_ASKED + INSERTED + "[[b<|im_end|>]]"]),
    "qwen, thinking": ("qwen3_thinking", TWICE[:2], [CHATML_ASKED + INSERTED + "[[b<|im_end|>]]"]),
    "qwen, thought": ("qwen3", THOUGHT, [CHATML_ASKED + "[[<think>\nc\n</think>\n\nb<|im_end|>]]"]),
    "qwen, thinking, thought": (
        "qwen3_thinking", THOUGHT, [CHATML_ASKED + "<think>\n[[c\n</think>\n\nb<|im_end|>]]"]),
    "glm behind words of the switch": (
        "glm", THOUGHT, ["[gMASK]<sop><|user|>\na<|assistant|>[[\n<think>c</think>\nb<|user|>]]"]),
    "written": ("chatml", [user("a"), said(INSERTED + "b")], [CHATML_ASKED + f"[[{INSERTED}b<|im_end|>]]"]),
    # Rule 8. The template of Qwen omits the inserted block once the turn is history.
    "raw call, turns": ("qwen3", CALLED, [
        CHATML_ASKED + f"{INSERTED}[[{RAW}<|im_end|>]]",
        CHATML_ASKED + RAW + TO_TOOL + f"{INSERTED}[[done<|im_end|>]]"]),
    "raw call": ("chatml", CALLED, [
        CHATML_ASKED + f"[[{RAW}<|im_end|>]]\n<|im_start|>tool\nva<|im_end|>\n<|im_start|>assistant\n"
        "[[done<|im_end|>]]"]),
    "empty": ("chatml", [user("a"), said("")], [CHATML_ASKED + "[[<|im_end|>]]"]),
    "empty, glm": ("glm", [user("a"), said("")], [GLM_ASKED + "[[<|user|>]]"]),
    "empty, completion": ("chatml", {"prompt": [user("a")], "completion": ""}, [CHATML_ASKED + "[[<|im_end|>]]"]),
    **{f"empty of {name}, turns": ("qwen3", {"prompt": [user("a")], name: ["4", ""], "rewards": [1, 0]}, [
        CHATML_ASKED + INSERTED + end for end in ("[[4<|im_end|>]]", "[[<|im_end|>]]")])
       for name in ("completions", "responses")},
    "two answers in a row": ("chatml", [user("a"), said("b"), said("c")], [
        CHATML_ASKED + "[[b<|im_end|>]]\n<|im_start|>assistant\n[[c<|im_end|>]]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", EXAMPLES)
def test_examples(shown, case):
    name, given, texts, *changes = EXAMPLES[case]
    assert shown(name, given, expand=case.endswith(", turns"), **(changes[0] if changes else {})) == texts
    assert "/nothink" in BY_NAME["glm"].template  # the words of its switch


# Rule 1 and 2: the sample ends with the token that stopped the model.


@pytest.mark.parametrize("stops", [None, ("<|endoftext|>", "<|end|>"), ("<|endoftext|>",)])
def test_turn_of_phi_ends_alike_with_any_generation_config(shown, stops):
    assert shown("phi", [user("a"), said("b")], stops=stops) == ["<|user|>\na<|end|>\n<|assistant|>\n[[b<|end|>]]"]


def test_generation_config_with_a_number_lists_one_stop(made, read, tmp_path):
    family, _, _ = made("gemma")
    folder = family.make(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    tokenizer = load_tokenizer(folder)
    (sample,) = read(tokenizer, {"messages": [user("a"), said("b")]})
    assert marked(tokenizer, sample) == (
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n[[b<end_of_turn>]]"
    )


def test_channels_of_harmony_are_one_turn(shown):
    messages = [user("a"), said("", reasoning="hm", tool_calls=call(k=1)), tool("c"), said("d", reasoning="so")]
    first = (
        "<|start|>user<|message|>a<|end|><|start|>assistant[[<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        ' to=functions.find<|channel|>commentary json<|message|>{"k": 1}<|call|>]]'
    )
    second = (
        '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"c"<|end|><|start|>assistant'
        "[[<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>]]"
    )
    history = first.replace("[[", "").replace("]]", "")
    assert shown("harmony", messages, expand=True) == [first, history + second]
    assert shown("harmony", messages) == [first + second]


# Rule 3: the next role's token stops the model.


@pytest.mark.parametrize(
    ("last", "stop"),
    [([said("", tool_calls=call())], "<|observation|>"), ([said("x")], "<|user|>"),
     ([said("x"), tool("y")], "<|observation|>"), ([said("x"), user("y")], "<|user|>")],
)  # fmt: skip
def test_last_turn_of_glm_gets_the_next_turns_token(shown, last, stop):
    (text,) = shown("glm", [user("a"), *last])
    assert text.startswith("[gMASK]<sop><|user|>\na<|assistant|>\n<think></think>[[\n")
    assert text.endswith(f"{stop}]]")


# Rule 4: a turn that was cut.


@pytest.mark.parametrize(("key", "value"), CUT_KEYS)
def test_cut_turn_has_no_scored_end(shown, key, value):
    for expand in (False, True):
        (text,) = shown("chatml", [user("a"), said("b", **{key: value})], expand=expand)
        assert text.removesuffix("<|im_end|>") == CHATML_ASKED + "[[b]]"
        (text,) = shown("glm", [user("a"), said("b", **{key: value})], expand=expand)
        assert text.removesuffix("<|user|>") == "[gMASK]<sop><|user|>\na<|assistant|>\n<think></think>[[\nb]]"


@pytest.mark.parametrize(("key", "value"), WHOLE_KEYS)
def test_turn_that_was_not_cut_has_its_end(shown, key, value):
    assert shown("chatml", [user("a"), said("b", **{key: value})]) == [CHATML_ASKED + "[[b<|im_end|>]]"]


OTHER_CUTS = [
    {"finish_reason": "stop", "stop_reason": "</answer>"},
    {"finish_reason": {"type": "stop", "matched": "</answer>"}},
    {"finish_reason": "stop_sequence"},
]
OTHER_ENDS = [
    {"status": "completed"},
    {"metadata": {"finish_reason": 3}},
    {"finish_reason": "stop", "stop_reason": "<|im_end|>"},
    {"finish_reason": {"type": "stop", "matched": "<|im_end|>"}},
]


@pytest.mark.parametrize("keys", OTHER_CUTS + OTHER_ENDS)
def test_other_ways_to_say_how_a_message_ended(shown, keys):
    end = "[[b]]<|im_end|>" if keys in OTHER_CUTS else "[[b<|im_end|>]]"
    assert shown("chatml", [user("a"), said("b", **keys)]) == [CHATML_ASKED + end]


def test_unknown_reason_is_warned_of_once(shown, caplog):
    for _ in range(2):
        assert shown("chatml", [user("a"), said("b", finish_reason="gave_up")]) == [CHATML_ASKED + "[[b<|im_end|>]]"]
    assert caplog.text.count("'messages[1].finish_reason' is \"gave_up\", which is taken as an end") == 1


@pytest.mark.parametrize(("key", "value"), CUT_KEYS)
def test_record_marks_its_last_turn_as_cut(shown, key, value):
    ended, cut = CHATML_ASKED + "[[b<|im_end|>]]", CHATML_ASKED + "[[b]]"
    conversation = [user("a"), said("b"), user("c"), said("d")]
    prompt = [user("a")]
    for expand in (False, True):
        texts = shown("chatml", {"messages": conversation, key: value}, expand=expand)
        assert "[[b<|im_end|>]]" in texts[0]
        assert texts[-1].removesuffix("<|im_end|>").endswith("[[d]]")
        (text,) = shown("chatml", {"prompt": prompt, "completion": "b", key: value}, expand=expand)
        assert text.removesuffix("<|im_end|>") == cut
        for name in ("completions", "responses"):
            values = [value, WHOLE_KEYS[[one for one, _ in WHOLE_KEYS].index(key)][1]]
            record = {"prompt": prompt, name: ["b", "b"], "rewards": [0, 1], key: values}
            first, second = shown("chatml", record, expand=expand)
            assert first.removesuffix("<|im_end|>") == cut
            assert second == ended


# Rule 5: switches.


@pytest.mark.parametrize(("key", "value"), switches(False, 0))
def test_turn_that_is_off_is_not_scored(made, read, shown, key, value):
    messages = [user("a"), said("b", **{key: value}), user("c"), said("d")]
    follows = "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[d<|im_end|>]]"
    assert shown("chatml", messages) == [CHATML_ASKED + f"b<|im_end|>\n{follows}"]
    _, tokenizer, _ = made("chatml")
    off, on = read(tokenizer, {"messages": messages}, expand=True)
    assert off.source.endswith(" turn 0")
    assert not off.loss_mask.any()
    assert on.source.endswith(" turn 1")
    assert marked(tokenizer, on) == CHATML_ASKED + f"b<|im_end|>\n{follows}"


def test_turn_that_is_off_is_not_scored_with_harmony(shown):
    messages = [user("two"), said("wrong call", loss=0), user("error"), said("five", loss=1)]
    template = (
        "{%- for m in messages -%}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
        "{{- '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    )
    texts = shown("harmony", messages, expand=True, template=template, stops=None)
    assert "[[" not in texts[0]
    assert texts[1] == (
        "<|start|>user<|message|>two<|end|><|start|>assistant<|message|>wrong call<|end|><|start|>user<|message|>error"
        "<|end|><|start|>assistant[[<|message|>five<|return|>]]"
    )


@pytest.mark.parametrize(("key", "value"), switches(True, 1, None))
def test_turn_that_is_on_is_scored(shown, key, value):
    assert shown("chatml", [user("a"), said("b", **{key: value})]) == [CHATML_ASKED + "[[b<|im_end|>]]"]


@pytest.mark.parametrize("key", SWITCHES)
def test_number_weighs_the_tokens_of_a_turn(made, read, key):
    _, tokenizer, _ = made("chatml")
    messages = [user("a"), said("b", **{key: 0.25}), user("c"), said("d")]
    (sample,) = read(tokenizer, {"messages": messages})
    weights = [weight for weight in sample.loss_mask.tolist() if weight]
    assert weights == [0.25, 0.25, 1.0, 1.0]
    first, _ = read(tokenizer, {"messages": messages}, expand=True)
    assert [weight for weight in first.loss_mask.tolist() if weight] == [0.25, 0.25]


@pytest.mark.parametrize("keys", [{"loss": 1, "weight": 0}, {"train": True, "loss": 0.5}])
def test_switches_that_contradict_each_other_are_named(shown, keys):
    with pytest.raises(SampleError) as caught:
        shown("chatml", [user("a"), said("b", **keys)])
    assert all(key in str(caught.value) for key in keys)


def test_switches_that_agree_are_one(shown):
    messages = [user("a"), said("b", loss=0, weight=0.0, train=False), user("c"), said("d", loss=True, weight=1)]
    (text,) = shown("chatml", messages)
    assert text.count("[[") == 1
    assert text.endswith("[[d<|im_end|>]]")


@pytest.mark.parametrize(("key", "value"), switches(True, 1, False, 0))
def test_switch_of_a_message_that_is_not_the_assistants(shown, key, value):
    """It may be off; OpenAI and slime define a weight for assistant messages only, so that it means nothing."""
    messages = [user("a", **{key: value}), said("b")]
    if value and key != "weight":
        with pytest.raises(SampleError, match=key):
            shown("chatml", messages)
    else:
        assert shown("chatml", messages) == [CHATML_ASKED + "[[b<|im_end|>]]"]


@pytest.mark.parametrize(("key", "value"), switches(False, 0))
def test_switches_of_sharegpt_are_read(shown, key, value):
    conversation = [
        {"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: value},
        {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"},
    ]  # fmt: skip
    (text,) = shown("chatml", {"conversations": conversation})
    assert text.count("[[") == 1
    assert text.endswith("[[d<|im_end|>]]")


@pytest.mark.parametrize(
    ("key", "value"),
    [("compute_loss", False), ("lossMask", 0), ("should_train", True), ("weights", [0, 1]), ("no_loss", True),
     ("supervised", 0), ("token_weight", 0.5), ("ignore", True), ("exclude", True), ("masked", 1), ("loss_scale", 1),
     ("train_on_turn", True), ("step_loss_mask", 1)],
)  # fmt: skip
def test_switch_under_another_name_is_refused(shown, key, value):
    for record in (
        [user("a"), said("b", **{key: value})],
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: value}]},
    ):
        with pytest.raises(
            SampleError, match=rf"\[1\]' has '{key}', which changes .* is not read: call it '(loss|weight)'"
        ):
            shown("chatml", record)


@pytest.mark.parametrize(
    ("key", "value"), [("ignore", False), ("trainer", "x"), ("training_id", "7"), ("glossy", True), ("mask_ratio", 0.5)]
)
def test_key_that_is_no_switch_is_left_alone(shown, key, value):
    assert shown("chatml", [user("a"), said("b", **{key: value})]) == [CHATML_ASKED + "[[b<|im_end|>]]"]
    assert shown("chatml", [user("a", compute_loss=False), said("b")]) == [CHATML_ASKED + "[[b<|im_end|>]]"]


@pytest.mark.parametrize("key", ["loss", "weight", "mask"])
def test_switch_of_a_part_is_refused(shown, key):
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c", key: 0}]
    with pytest.raises(SampleError, match=rf"messages\[1\]\.content' has a part with '{key}'"):
        shown("chatml", [user("a"), {"role": "assistant", "content": parts}])


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", 0), ("train", False), ("masked", True), ("step_loss_mask", [0]), ("loss_scale", [0, 1]),
     ("is_train", [True, False])],
)  # fmt: skip
def test_switch_beside_the_messages_is_refused(made, read, shown, key, value):
    record = {"messages": [user("a"), said("b")], key: value}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    of_text = ({"prompt": "a", "completion": "b"}, {"prompt": "a", "responses": ["b", "c"]}, pair)
    others = [] if isinstance(value, list) else [other | {key: value} for other in of_text]
    for refused in (record, *others):
        with pytest.raises(SampleError, match=rf"'{key}' of the record is not read.*data.fields={{\"{key}\": null}}"):
            shown("chatml", refused)
    _, tokenizer, _ = made("chatml")
    assert read(tokenizer, record, names=FieldNames(given={key: None}))[0].loss_mask.any()


def test_key_twice_in_a_message_is_named(shown, tmp_path, made):
    _, tokenizer, _ = made("chatml")
    path = tmp_path / "twice.jsonl"
    for message, name in (
        ('{"role": "assistant", "content": "b", "loss": 0, "loss": 1}', "messages"),
        ('{"from": "gpt", "value": "b", "loss": 0, "loss": 1}', "conversations"),
    ):
        asked = '{"role": "user", "content": "a"}' if name == "messages" else '{"from": "human", "value": "a"}'
        path.write_text(f'{{"{name}": [{asked}, {message}]}}\n')
        with pytest.raises(SampleError, match=rf"'{name}\[1\]' has the key 'loss' twice; drop one"):
            read_samples(path, tokenizer=tokenizer)


# Rule 6: an empty thinking block that the template inserts.


def test_inserted_thinking_is_prompt_without_a_switch_in_the_template(shown, made):
    family, _, _ = made("qwen3")
    template = family.template.partition("{%- if enable_thinking")[0] + "{%- endif -%}"
    assert "enable_thinking" not in template
    (text,) = shown("qwen3", [user("a"), said("b")], template=template)
    assert text.endswith("assistant\n<think>\n\n</think>\n\n[[b<|im_end|>]]")


def test_prompt_without_thinking_holds_the_block(shown):
    kwargs = {"enable_thinking": False}
    (text,) = shown("qwen3", [user("a"), said("b")], template_kwargs=kwargs)
    assert text.endswith("assistant\n<think>\n\n</think>\n\n[[b<|im_end|>]]")


# Rule 7: reasoning under any name.


@pytest.mark.parametrize("key", REASONING_NAMES)
def test_reasoning_is_written_under_the_name_that_the_template_reads(shown, key):
    messages = [user("a"), said("b", **{key: "hm"})]
    assert shown("qwen3", messages)[0].endswith("[[<think>\nhm\n</think>\n\nb<|im_end|>]]")
    assert shown("glm", messages)[0].endswith("[[\n<think>hm</think>\nb<|user|>]]")
    assert shown("harmony", messages)[0].endswith(
        "[[<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>]]"
    )


@pytest.mark.parametrize("key", REASONING_NAMES)
@pytest.mark.parametrize("empty", ["", None])
def test_empty_reasoning_is_none(shown, key, empty):
    assert shown("chatml", [user("a"), said("b", **{key: empty})]) == [CHATML_ASKED + "[[b<|im_end|>]]"]
    assert shown("qwen3", [user("a"), said("b", **{key: empty})])[0].endswith("</think>\n\n[[b<|im_end|>]]")


@pytest.mark.parametrize("key", REASONING_NAMES)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.reasoning is None])
def test_reasoning_that_the_template_drops_is_refused(shown, name, key):
    for content in ("b", "hm and more"):  # the answer may hold the same text
        with pytest.raises(SampleError, match=key):
            shown(name, [user("a"), said(content, **{key: "hm"})])


# Rule 8: tools, developers, nothing at all.


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [("thought", "add", "reasoning_content"), ("reasoning_details", [{"text": "add"}], "reasoning_content"),
     ("thinking_blocks", [{"thinking": "add"}], "reasoning_content"), ("refusal", "no", "content")],
)  # fmt: skip
def test_text_under_a_name_that_is_not_read_is_refused(shown, key, value, ours):
    for name in ("chatml", "qwen3"):
        with pytest.raises(SampleError, match=rf"messages\[1\]\.{key}' is not read, so that .* call it '{ours}'"):
            shown(name, [user("a"), said("b", **{key: value})])
    for harmless in ({key: None}, {key: value, "loss": 0}, {key: value[:0]}):
        shown("chatml", [user("a"), said("b", **harmless), user("c"), said("d")])
    if ours != "content":  # OpenRouter gives both
        (text,) = shown("qwen3", [user("a"), said("b", reasoning="add", **{key: value})])
        assert "add" in text
    template = BY_NAME["chatml"].template.replace("m.content", f"m.content + (m.{key} | string if m.{key} else '')")
    assert shown("chatml", [user("a"), said("b", **{key: value})], template=template)


def test_developer_becomes_system_without_a_developer_role(shown):
    messages = [{"role": "developer", "content": "be"}, user("a"), said("b")]
    assert shown("qwen3", messages)[0].startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user")
    assert shown("gemma", messages)[0].startswith("<bos><start_of_turn>user\nbe\n\na<end_of_turn>")
    assert shown("phi", messages)[0].startswith("<|system|>\nbe<|end|>\n")


def test_developer_stays_if_the_template_has_the_role(shown):
    messages = [{"role": "developer", "content": "be"}, user("a"), said("b")]
    assert shown("harmony", messages)[0].startswith("<|start|>developer<|message|>be<|end|>")
    assert shown("chatml", messages)[0].startswith("<|im_start|>developer\nbe<|im_end|>\n")


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_call_without_arguments_has_an_empty_object(shown, arguments):
    calls = [{"function": {"name": "find", "arguments": arguments}}]
    assert shown("chatml", [user("a"), said(None, tool_calls=calls)]) == [
        CHATML_ASKED + "[[<tool_call>find {}</tool_call><|im_end|>]]"
    ]


def test_reward_of_an_empty_answer_stays(made, read):
    _, tokenizer, _ = made("chatml")
    samples = read(tokenizer, {"prompt": [user("a")], "responses": ["4", ""], "rewards": [1, 0]}, expand=True)
    assert [sample.signals.reward for sample in samples] == [1, 0]


# Long conversations are rendered in pieces.


@EVERY_FAMILY
def test_long_conversation_is_encoded_as_turn_by_turn_in_linear_work(made, name, monkeypatch):
    family, tokenizer, _ = made(name)
    rows = [user("start"), said("so")]
    for number in range(24):
        rows += [user(f"ask {number} \n\n"), said(f"\n\nword {number}", **({"reasoning": "hm"} if number % 3 else {}))]
        if family.calls:
            rows += [user("look"), said("", tool_calls=call(k=number)), tool(f"found {number}"), said("done")]
    if not family.reasoning:
        rows = [{key: one for key, one in row.items() if key != "reasoning"} for row in rows]
    messages = parse_messages(rows)
    rendered_messages = 0
    render = ChatTemplates.render

    def counted(self, given, *rest, **options):
        nonlocal rendered_messages
        rendered_messages += len(given)
        return render(self, given, *rest, **options)

    monkeypatch.setattr(ChatTemplates, "render", counted)
    spliced = tokenizer.encode_turns(messages)
    assert rendered_messages < 24 * len(messages)
    monkeypatch.setattr(turn_texts, "_FEW", len(messages))
    for one, other in zip(spliced, tokenizer.encode_turns(messages), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.start, one.end) == (other.start, other.end)


def test_template_that_is_not_local_is_rendered_turn_by_turn(made, monkeypatch):
    template = "{{- (messages | length + 1) // 2 -}}" + BY_NAME["chatml"].template
    _, tokenizer, official = made("chatml", template=template)
    rows = [one for number in range(12) for one in (user(f"a{number}"), said("b"))]
    for at, turn in enumerate(tokenizer.encode_turns(parse_messages(rows))):
        whole = official.apply_chat_template(rows[: 2 * at + 2], tokenize=False)
        assert whole.startswith(official.decode(turn.tokens))


# Templates that TRL marks with {% generation %}: it also scores what the template adds around the model's own text.
TRL = {
    "qwen2_5": "chatml", "qwen3": "qwen3", "llama3": "llama", "gemma3": "gemma", "phi3": "phi", "glm4moe": "glm",
    "deepseekv3": "deepseek",
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
@given(data=st.data())
def test_training_templates_of_trl(made, name, data):
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("TRL is not installed")
    folder = Path(trl.origin).parent / "chat_templates"
    family, tokenizer, official = made(TRL[name], template=(folder / f"{name}_training.jinja").read_text())
    words = st.sampled_from(["hello", "two plus two", "größe 😀", "a\tb"])
    rows = [
        one
        for _ in range(data.draw(st.sampled_from([1, 3, 12])))
        for one in (user(data.draw(words)), said(data.draw(words)))
    ]
    for at, turn in enumerate(tokenizer.encode_turns(parse_messages(rows))):
        theirs = official.apply_chat_template(
            rows[: 2 * at + 2], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        ids, mask = theirs["input_ids"], theirs["assistant_masks"]
        tokens = turn.tokens.tolist()
        assert ids[: len(tokens)] == tokens
        assert all(mask[turn.start : turn.end])
        end = {"phi3": "<|end|>", "gemma3": "<end_of_turn>", "glm4moe": "<|user|>"}.get(name, family.eos)
        end = family.stops[-1] if name == "llama3" and family.stops else end
        assert official.decode(tokens[turn.start :]).strip() in (rows[2 * at + 1]["content"] + end, "<|eot_id|>")
