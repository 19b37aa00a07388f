"""Data as people have it: other formats and other names give the samples that ``messages`` and TRL's rules give."""

from __future__ import annotations

from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sources import CharacterTokenizer
from harness.commands import write_rows
from harness.tokenizer_folders import CHATML, make_folder, official

from mcore_prefix_tree.data import FieldNames, LineOptions, Skipped, StreamedGroups, load_tokenizer, read_samples
from mcore_prefix_tree.data.formats import FIELDS, FORMATS, READ
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.sample import SampleError

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
OTHER = {"role": "assistant", "content": "no"}
ASKS = [{"role": "system", "content": "be brief"}, USER, ASSISTANT, {"role": "user", "content": "well?"}]
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def read(folder, *rows, table=False, **options):
    """Samples of rows, from a file of lines or a table."""
    path = folder / ("rows.parquet" if table else "rows.jsonl")
    if table:
        columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
        pq.write_table(pa.table(columns), path)
    else:
        write_rows(path, rows)
    options = {"tokenizer": CharacterTokenizer()} | options
    samples = read_samples(path, **options)
    streamed = [sample for line in StreamedGroups(path, LineOptions(**options)) for sample in line]
    assert [told(sample) for sample in streamed] == [told(sample) for sample in samples]
    return samples


def told(sample):
    return sample.tokens.tolist(), sample.loss_mask.tolist(), repr(sample.signals)


def content(sample):
    return sample.tokens.tolist(), sample.loss_mask.tolist()


def text(sample):
    """Unscored and scored text of a sample with one turn."""
    first = sample.loss_mask.tolist().index(1)
    return "".join(map(chr, sample.tokens[:first])), "".join(map(chr, sample.tokens[first:]))


def parts(*texts):
    return [{"type": "text", "text": one} for one in texts]


AS_MESSAGES = {
    "content parts": (
        {"messages": [{"role": "user", "content": parts("h", "i")}, {"role": "assistant", "content": parts("no")}]},
        [USER, OTHER],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "be brief"},
        [ASKS[0], USER, ASSISTANT],
    ),
    "sharegpt with roles": ({"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
    "sharegpt calls": (
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": [1]}}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "yo"},
            ]
        },
        [
            USER,
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": [1]}}]},
            {"role": "tool", "content": "3"},
            ASSISTANT,
        ],
    ),
    "prompt-completion": ({"prompt": [USER], "completion": [ASSISTANT]}, [USER, ASSISTANT]),
    "a text behind messages": ({"prompt": [USER], "completion": "yo"}, [USER, ASSISTANT]),
}  # fmt: skip


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("case", AS_MESSAGES)
def test_formats_of_one_conversation(tmp_path, case, table):
    row, messages = AS_MESSAGES[case]
    (sample,) = read(tmp_path, row, table=table)
    (expected,) = read(tmp_path, {"messages": messages})
    assert content(sample) == content(expected)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("expand_turns", [False, True])
def test_only_the_completion_of_a_conversation_is_scored(tmp_path, expand_turns, table):
    """Not the assistant's turns in the prompt, which SFT on ``messages`` would score."""
    row = {"prompt": ASKS, "completion": [OTHER, USER, ASSISTANT]}
    whole = read(tmp_path, {"messages": [*row["prompt"], *row["completion"]]}, expand_turns=True)
    samples = read(tmp_path, row, table=table, expand_turns=expand_turns)
    if expand_turns:
        assert [content(one) for one in samples] == [content(one) for one in whole[1:]]
        return
    (sample,) = samples
    assert sample.tokens.tolist() == whole[-1].tokens.tolist()
    last_two = whole[1].loss_mask.tolist() + whole[2].loss_mask.tolist()[len(whole[1]) :]
    assert sample.loss_mask.tolist() == last_two


def test_a_format_that_joins_answers_counts_its_own_turns(tmp_path):
    """Mistral's makes one turn of several assistant messages in a row, in the prompt too."""
    prompt = [USER, ASSISTANT, OTHER, USER]
    (sample,) = read(tmp_path, {"prompt": prompt, "completion": [OTHER]}, tokenizer=load_tokenizer())
    *_, last = read(tmp_path, {"messages": [*prompt, OTHER]}, tokenizer=load_tokenizer(), expand_turns=True)
    assert content(sample) == content(last)


PREFERENCES = {
    "explicit": {"prompt": ASKS, "chosen": [ASSISTANT], "rejected": [OTHER]},
    "implicit": {"chosen": [*ASKS, ASSISTANT], "rejected": [*ASKS, OTHER]},
    "prompt as text too": {"prompt": "well?", "chosen": [*ASKS, ASSISTANT], "rejected": [*ASKS, OTHER]},
}


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("case", PREFERENCES)
def test_preferences(tmp_path, case, table):
    samples = read(tmp_path, PREFERENCES[case], {"pair": 7} | PREFERENCES[case], table=table)
    expected = [{"prompt": ASKS, "completion": [one]} for one in (ASSISTANT, OTHER)] * 2
    with_pair = [(one.signals.pair, one.signals.chosen) for one in samples]
    assert [content(one) for one in samples] == [content(one) for one in read(tmp_path, *expected)]
    assert with_pair[0][0] == with_pair[1][0] != 7
    assert with_pair[2:] == [(7, True), (7, False)]
    assert [chosen for _, chosen in with_pair] == [True, False] * 2
    assert [one.part for one in samples] == ["chosen", "rejected"] * 2
    for expand_turns in (False, True):
        pair = read(tmp_path, PREFERENCES[case], table=table, expand_turns=expand_turns)
        with pytest.raises(
            SampleError, match=r"rejected.*: this is the rejected answer of a pair, which objective\.name"
        ):
            make_objective("sft").check(pair)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("name", ["completions", "responses"])
def test_rollouts_of_a_prompt(tmp_path, name, table):
    """As verl and TRL write them: other columns are ignored."""
    row = {
        "data_source": "gsm8k", "prompt": [USER], name: ["yo", "no"], "rewards": [1.0, -0.5],
        "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}, "temperature": 0.7,
    }  # fmt: skip
    samples = read(tmp_path, row, row | {"group": "q"}, table=table)
    expected = read(tmp_path, *({"messages": [USER, one], "temperature": 0.7} for one in (ASSISTANT, OTHER)))
    assert [content(one) for one in samples] == [content(one) for one in expected] * 2
    assert [one.signals.reward for one in samples] == [1.0, -0.5] * 2
    first, second, *named = [one.signals.group for one in samples]
    assert first == second
    assert named == ["q", "q"]
    assert {one.temperature for one in samples} == {0.7}


@pytest.mark.parametrize("limit", [4, 3])
def test_both_sides_of_a_pair_are_skipped(tmp_path, limit):
    """One side that is too long leaves nothing to compare the other with."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": [USER], "chosen": one, "rejected": "c"} for one in ("longer than that", "b")]
    write_rows(path, rows)
    skipped = Skipped()
    options = {"tokenizer": CharacterTokenizer(), "limits": {"batch.max_tokens": limit + 2}}
    if limit == 3:
        with pytest.raises(SampleError, match="no samples; skipped 4 bad samples"):
            read_samples(path, on_error="skip", **options)
        return
    samples = read_samples(path, on_error="skip", skipped=skipped, **options)
    assert [one.signals.chosen for one in samples] == [True, False]
    assert skipped.kinds == {"too long": 2}
    assert skipped.first[1] == f"{path}:1 rejected: the other side of its pair is skipped"


def test_desirable_completions(tmp_path):
    samples = read(tmp_path, *({"prompt": [USER], "completion": [ASSISTANT], "label": one} for one in (True, False)))
    assert [one.signals.label for one in samples] == [True, False]


TEXTS = [("The sky is", " blue."), ("The sky is ", "blue."), ("a", ""), ("", "all of it"), ("look up ", " \n\nparcel")]


@needs_transformers
@pytest.mark.parametrize("prompt_completion", TEXTS)
@pytest.mark.parametrize("template", ["plain", "metaspace"])
def test_text_is_encoded_as_trl_does(tmp_path, prompt_completion, template):
    """Together, with an end of sequence; scored from the first token that differs from the prompt's."""
    prompt, completion = prompt_completion
    folder = make_folder(tmp_path / "tokenizer", CHATML, prepend_space=template == "metaspace")
    encode, end = official(folder), official(folder).eos_token
    whole, before = encode(prompt + completion + end)["input_ids"], encode(prompt)["input_ids"]
    start = next((i for i, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), len(before))
    row = {"prompt": prompt, "completion": completion}
    (sample,) = read(tmp_path, row, tokenizer=load_tokenizer(folder))
    assert content(sample) == (whole, [0.0] * start + [1.0] * (len(whole) - start))
    (ended,) = read(tmp_path, row | {"completion": completion + end}, tokenizer=load_tokenizer(folder))
    assert content(ended) == content(sample)


@needs_transformers
def test_both_texts_of_a_pair_are_scored_from_one_token_on(tmp_path):
    """Also if the prompt's last character is a separate token in only one of them."""
    tokenizer = load_tokenizer(make_folder(tmp_path / "tokenizer", CHATML, joins=["  "]))
    rows = {"prompt": "q: ", "chosen": " a", "rejected": "b"}, {"chosen": "q:  a", "rejected": "q: b"}
    for row in rows:
        chosen, rejected = read(tmp_path, row, tokenizer=tokenizer)
        whole = [tokenizer.encode_completion("", text).tokens.tolist() for text in ("q:  a", "q: b")]
        assert [chosen.tokens.tolist(), rejected.tokens.tolist()] == whole
        assert chosen.loss_mask.tolist().index(1) == rejected.loss_mask.tolist().index(1) == 2


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
BAD = {
    "an image": ({"messages": [IMAGE, ASSISTANT]}, "field 'messages[0].content[0].type' must be 'text', not \"im"),
    "images": ({"prompt": "a", "completion": "b", "images": ["x"]}, "field 'images' is not supported with 'com"),
    "template": ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"a": 1}}, "set data.chat_template_kwargs"),
    "both": (
        {"messages": [USER, ASSISTANT], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        "has the fields 'messages' and 'rejected', and each of them is a sample by itself; give exactly one, or leave "
        "'rejected' unread: data.fields={rejected: null}",
    ),
    "three": ({"tokens": [1], "completion": "b", "responses": ["c"]}, "fields 'tokens', 'completion' and 'responses'"),
    "a prompt alone": ({"prompt": [USER]}, "has a 'prompt' and nothing to train on; sample from it"),
    "no prompt": ({"completion": "a"}, "field 'prompt' is missing"),
    "no chosen": ({"rejected": "a"}, "field 'rejected' needs field 'chosen', which is missing"),
    "two kinds": ({"chosen": "a", "rejected": [OTHER]}, "must both be texts or both be lists of messages"),
    "messages behind text": ({"prompt": "a", "completion": [ASSISTANT]}, "field 'completion' must be text, as the"),
    "another prompt": (
        {"prompt": "else", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        "field 'prompt' is text that 'chosen' and 'rejected', which are messages, do not begin with",
    ),
    "equal": ({"chosen": "ab", "rejected": "ab"}, "do not begin alike and then differ"),
    "one goes on": ({"chosen": [USER], "rejected": [USER, OTHER]}, "do not begin alike and then differ"),
    "nothing alike": ({"chosen": [ASSISTANT], "rejected": [OTHER]}, "do not begin alike and then differ"),
    "nobody answers": ({"prompt": [USER], "completion": [USER]}, "field 'completion' has no assistant message"),
    "goes on": ({"prompt": [USER, ASSISTANT], "completion": [OTHER]}, "field 'prompt' ends with an assistant message"),
    "sender": ({"conversations": [{"from": "bob", "value": "a"}]}, "field 'conversations[0].from' is \"bob\"; it must"),
    "call": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]},
        "field 'conversations[1].value' is a function call that is not valid JSON",
    ),
    "in a completion": (
        {"prompt": [USER], "completion": [{"role": "assistant", "content": 3}]},
        "field 'completion[0].content' must be a valid string, not 3",
    ),
    "no list": ({"prompt": "a", "completions": "b"}, "field 'completions' must be a list of at least one completion"),
    "rewards": ({"prompt": "a", "responses": ["b", "c"], "rewards": [1]}, "field 'rewards' must be a list of 2 numb"),
    "steps": ({"prompt": "a", "completions": ["b"], "labels": [True]}, "field 'labels' is not supported with"),
    "mask": ({"prompt": "a", "completion": "b", "loss_mask": [1]}, "field 'loss_mask' goes with 'tokens'"),
    "logprobs": ({"prompt": [USER], "completion": "b", "old_logprobs": [1]}, "field 'old_logprobs' goes with 'tokens'"),
    "tools": ({"prompt": "a", "completion": "b", "tools": [3]}, "field 'tools' goes with messages, but the prompt is"),
    "tools as text": ({"messages": [USER, ASSISTANT], "tools": "["}, "field 'tools' is \"[\", which is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_named(tmp_path, case):
    row, says = BAD[case]
    with pytest.raises(SampleError) as raised:
        read(tmp_path, row)
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / 'rows.jsonl'}:1")
    assert "\n" not in str(raised.value)


def test_table_with_only_prompts(tmp_path):
    """For example verl's, before anything was sampled."""
    with pytest.raises(
        SampleError, match=r"rows\.parquet: has a 'prompt' and nothing to train on; sample from it, and"
    ):
        read(tmp_path, {"data_source": "gsm8k", "prompt": [USER]}, table=True)


@pytest.mark.parametrize("table", [False, True])
def test_names_of_the_file(tmp_path, table):
    """One that is mapped is read under no other name; one that is mapped to nothing is not read."""
    row = {"input_ids": [1, 2, 3], "tokens": "not ours", "reward": 5.0, "score": 0.25, "messages": "a summary"}
    row |= {"labels": [0, 0, 1], "uid": "q", "label": 3.0}
    names = {"tokens": "input_ids", "loss_mask": "labels", "reward": "score", "messages": None, "group": "uid"}
    names["advantage"] = "label"
    (sample,) = read(tmp_path, row, table=table, names=FieldNames(given=names))
    assert content(sample) == ([1, 2, 3], [0, 0, 1])
    signals = sample.signals
    assert (signals.reward, signals.group, signals.advantage, signals.label) == (0.25, "q", 3.0, None)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"group": "taskid"}, "no record has the field 'taskid', which data.fields reads as 'group'; correct the name"),
        ({"tokens": "ids"}, "ids"),
    ],
)
def test_a_name_that_no_record_has(tmp_path, names, says, table):
    with pytest.raises(SampleError, match=says):
        read(tmp_path, {"tokens": [1, 2]}, {"tokens": [1], "task_id": 1}, table=table, names=FieldNames(given=names))


@pytest.mark.parametrize("size", [1, 3])
def test_a_name_of_one_record_in_three(tmp_path, size):
    from data_sources import by_ranks

    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": [1]}\n{"tokens": [2], "uid": 4}\n{"tokens": [3]}\n')
    options = LineOptions(names=FieldNames(given={"group": "uid"}))
    for groups in by_ranks(size, lambda ranks: StreamedGroups(path, options, ranks=ranks)):
        assert [one[0].signals.group for one in groups] == [None, 4, None]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"grop": "a"}, "'grop' is not a field that samples have; is 'group' meant?"),
        ({"xyz": "a"}, "'xyz' is not a field that samples have; the fields are tokens, loss_mask, messages"),
        ({"group": 3}, "the file's name of 'group' is 3; it must be text, or null"),
        ({"group": "a", "pair": "a"}, "'a' is read as 'group' and as 'pair'; give each its own field"),
    ],
)
def test_impossible_field_names_are_rejected(names, says):
    with pytest.raises(ValueError, match=says):
        FieldNames(given=names)


def test_every_mark_belongs_to_one_format():
    """Or a record of another format would be ambiguous."""
    assert FORMATS.keys() <= set(FIELDS)
    assert all(READ[mark] & FORMATS.keys() == {mark} for mark in FORMATS)
