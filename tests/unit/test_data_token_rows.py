"""Rows of token ids as trainers write them: labels, padding, and fields that are as long as the response."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness.commands import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree.data import FieldNames, LineOptions, StreamedGroups, read_samples
from mcore_prefix_tree.data.keys import meaning
from mcore_prefix_tree.sample import SampleError

PER_TOKEN = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns", "advantage")
FORMS = ("jsonl", "parquet", "arrow")


def write(folder, rows, form):
    path = folder / f"rows.{form}"
    if form == "jsonl":
        write_rows(path, rows)
        return path
    table = pa.table({name: [row.get(name) for row in rows] for row in rows for name in row})
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


def read(folder, *rows, form="jsonl", names=None):
    """Samples of rows, read at once and streamed."""
    path = write(folder, rows, form)
    options = LineOptions(names=FieldNames(given=names or {}))
    samples = read_samples(path, names=options.names)
    streamed = [sample for line in StreamedGroups(path, options) for sample in line]
    assert [content(one) for one in streamed] == [content(one) for one in samples]
    return samples


def content(sample):
    """All fields of a sample, null for a missing number."""
    signals = sample.signals
    found = {name: numbers(getattr(signals, name)) for name in PER_TOKEN if getattr(signals, name) is not None}
    if signals.teacher is not None:
        found["teacher"] = signals.teacher.token_ids.tolist(), [numbers(row) for row in signals.teacher.logprobs]
    return sample.tokens.tolist(), sample.loss_mask.tolist(), found


def numbers(values):
    if np.ndim(values) == 0:
        return values
    return [None if math.isnan(value) else value for value in values.tolist()]


def one(folder, row, form="jsonl", names=None):
    (sample,) = read(folder, row, form=form, names=names)
    return content(sample)


@pytest.mark.parametrize("form", FORMS)
def test_labels_and_attention_mask_of_hugging_face(tmp_path, form):
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "attention_mask": [1, 1, 1, 1, 1], "labels": [-100, -100, -100, 8, 9]},
        {"input_ids": [5, 6, 7, 8, 0], "attention_mask": [1, 1, 1, 1, 0], "labels": [-100, -100, -100, 8, -100]},
    ]
    samples = read(tmp_path, *rows, form=form, names={"tokens": "input_ids"})
    assert [content(sample)[:2] for sample in samples] == [
        ([5, 6, 7, 8, 9], [0, 0, 0, 1, 1]),
        ([5, 6, 7, 8], [0, 0, 0, 1]),
    ]


def test_labels_that_are_all_the_tokens(tmp_path):
    assert one(tmp_path, {"tokens": [3, 4], "labels": [3, 4]}) == ([3, 4], [1, 1], {})
    assert one(tmp_path, {"tokens": [3, 3, 3], "labels": [-100, 3, -100]})[1] == [0, 1, 0]  # not shifted, though equal
    assert one(tmp_path, {"tokens": [3, 4], "labels": [-100, -100]})[1] == [0, 0]


def test_labels_keep_the_weights_of_an_equal_mask(tmp_path):
    row = {"tokens": [3, 4, 5, 6], "labels": [-100, 4, -100, 6], "loss_mask": [1, 0.5, 0, 2]}
    assert one(tmp_path, row)[1] == [1, 0.5, 0, 2]  # nothing predicts the first token


LONG = {
    "tokens": [1, 2, 3, 4, 5],
    "loss_mask": [0, 0, 1, 0, 1],
    "old_logprobs": [None, None, -1.5, None, -2.5],
    "advantage": [None, None, 0.5, None, 0.25],
}
OF_RESPONSE = {name: LONG[name][2:] for name in ("loss_mask", "old_logprobs", "advantage")}
AS_LONG_AS_THE_RESPONSE = {
    "slime": ({"tokens": LONG["tokens"], "response_length": 3, **OF_RESPONSE}, {}),
    "slime, its names": (
        {
            "tokens": LONG["tokens"], "response_length": 3, "loss_mask": OF_RESPONSE["loss_mask"],
            "log_probs": OF_RESPONSE["old_logprobs"], "advantage": OF_RESPONSE["advantage"], "status": "truncated",
        },
        {"old_logprobs": "log_probs"},
    ),
    "prompt and response": ({"prompt_tokens": [1, 2], "response_tokens": [3, 4, 5], **OF_RESPONSE}, {}),
    "prompt and response, long fields": (LONG | {"prompt_tokens": [1, 2], "response_tokens": [3, 4, 5]}, "tokens"),
    "verl, padded": (
        {
            "input_ids": [0, 0, 1, 2, 3, 4, 5, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0], "position_ids": [0] * 8,
            "responses": [3, 4, 5, 0], "response_mask": [1, 0, 1, 0], "old_log_probs": [-1.5, 0.0, -2.5, 0.0],
            "advantages": [0.5, 0, 0.25, 0],
        },
        {"tokens": "input_ids", "responses": None, "old_logprobs": "old_log_probs", "advantage": "advantages"},
    ),
    "verl, prompts and responses": (
        {
            "prompts": [0, 0, 1, 2], "responses": [3, 4, 5, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
            "response_mask": [1, 0, 1, 0], "old_log_probs": [-1.5, 0.0, -2.5, 0.0], "advantages": [0.5, 0, 0.25, 0],
        },
        {
            "prompt_tokens": "prompts", "response_tokens": "responses", "old_logprobs": "old_log_probs",
            "advantage": "advantages",
        },
    ),
    "trl": (
        {
            "prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_mask": [1, 1, 1], "tool_mask": [1, 0, 1],
            "old_per_token_logps": [-1.5, None, -2.5], "advantages": [0.5, None, 0.25], "prompt_mask": [1, 1],
        },
        {
            "prompt_tokens": "prompt_ids", "response_tokens": "completion_ids", "loss_mask": "tool_mask",
            "old_logprobs": "old_per_token_logps", "advantage": "advantages",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", AS_LONG_AS_THE_RESPONSE)
def test_fields_as_long_as_the_response(tmp_path, case, form):
    row, names = AS_LONG_AS_THE_RESPONSE[case]
    if names == "tokens":
        row, names = {name: value for name, value in row.items() if name != "tokens"}, {}
    tokens, mask, signals = one(tmp_path, row, form, names)
    expected = one(tmp_path, LONG)
    assert (tokens, mask) == expected[:2]
    for name, values in expected[2].items():
        assert [values[at] for at in (2, 4)] == [signals[name][at] for at in (2, 4)], name


def test_without_a_mask_only_the_response_is_scored(tmp_path):
    assert one(tmp_path, {"tokens": [1, 2, 3], "response_length": 2})[1] == [0, 1, 1]
    assert one(tmp_path, {"tokens": [1, 2, 3], "response_length": 0})[1] == [0, 0, 0]
    assert one(tmp_path, {"prompt_tokens": [1], "response_tokens": [2, 3]}) == ([1, 2, 3], [0, 1, 1], {})
    assert one(tmp_path, {"prompt_tokens": [], "response_tokens": [2, 3]})[:2] == ([2, 3], [1, 1])
    padded = {"tokens": [0, 1, 2, 3], "attention_mask": [0, 1, 1, 1]}
    assert one(tmp_path, padded)[:2] == ([1, 2, 3], [1, 1, 1])
    assert one(tmp_path, padded | {"response_length": 1})[:2] == ([1, 2, 3], [0, 0, 1])


def test_masks_of_trl_are_read_together(tmp_path):
    """As its SFT trainer folds them into labels: a token is scored that both masks score."""
    row = {"tokens": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 0, 1]}
    assert one(tmp_path, row)[1] == [0, 0, 0, 1]
    assert one(tmp_path, row | {"labels": [-100, -100, -100, 4]})[1] == [0, 0, 0, 1]
    assert one(tmp_path, {"tokens": [1, 2, 3], "response_mask": [False, True]})[1] == [0, 0, 1]


def test_teachers_are_aligned_too(tmp_path):
    teacher = {"token_ids": [[0, 0], [1, 2], [3, 4]], "logprobs": [[None, None], [-1.0, -2.0], [-1.5, -2.5]]}
    expected = one(tmp_path, {"tokens": [7, 8, 9], "loss_mask": [0, 1, 1], "teacher": teacher})
    shorter = {name: rows[1:] for name, rows in teacher.items()}
    row = {"tokens": [7, 8, 9], "response_length": 2, "teacher": shorter}
    padded = {"tokens": [7, 8, 9, 0], "attention_mask": [1, 1, 1, 0], "loss_mask": [0, 1, 1, 0]}
    padded["teacher"] = {"token_ids": [*teacher["token_ids"], [0, 0]], "logprobs": [*teacher["logprobs"], [-9.0, -9.0]]}
    for form in FORMS:
        assert one(tmp_path, row, form) == expected
        assert one(tmp_path, padded, form) == expected


TOKENS = {"tokens": [5, 6, 7, 8]}
BAD = {
    "shifted": ({"labels": [-100, 7, 8, -100]}, "field 'labels' is shifted by one: index 1 has the token of index 2"),
    "shifted, all": ({"labels": [6, 7, 8, 2]}, "field 'labels' is shifted by one: index 0 has the token of index 1"),
    "other labels": ({"labels": [-100, 6, 7, 9]}, "field 'labels' is 9 at index 3, but the token there is 8; a label"),
    "another ignored index": ({"labels": [-1, -1, 7, 8]}, "field 'labels' is -1 at index 0, but the token there is 5"),
    "short labels": ({"labels": [6, 7, 8]}, "field 'labels' has 3 entries, but there are 4 tokens; it must have an"),
    "labels of text": ({"labels": ["a"] * 4}, "field 'labels' must be a flat list of integers"),
    "one label": ({"labels": 3}, "field 'labels' must be a list with an entry for each token"),
    "mask against labels": (
        {"labels": [-100, -100, 7, 8], "loss_mask": [0, 1, 1, 1]},
        "fields 'loss_mask' and 'labels' contradict each other at index 1: only one of them scores the token",
    ),
    "labels outside the completion": (
        {"labels": [-100, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
        "fields 'labels' and 'completion_mask' contradict each other at index 1",
    ),
    "hole": ({"attention_mask": [1, 0, 1, 1]}, "field 'attention_mask' is 0 at index 1 between tokens that it shows"),
    "nothing": ({"attention_mask": [0, 0, 0, 0]}, "field 'attention_mask' is 0 for all tokens"),
    "packed": ({"attention_mask": [1, 1, 2, 2]}, "field 'attention_mask' must be a list of 0 and 1"),
    "short attention": ({"attention_mask": [1, 1, 1]}, "field 'attention_mask' has 3 entries, but there are 4 tokens"),
    "length": ({"response_length": 5}, "field 'response_length' is 5; it must be the number of tokens at the end of"),
    "length of text": ({"response_length": "2"}, "field 'response_length' is \"2\"; it must be the number of tokens"),
    "lengths": (
        {"response_length": 2, "loss_mask": [1, 1, 1]},
        "field 'loss_mask' has 3 entries, but there are 4 tokens, of which 2 are the response's; it must have",
    ),
    "padded length": (
        {"response_length": 2, "attention_mask": [1, 1, 1, 0]},
        "fields 'response_length' and 'attention_mask' do not say whether the 1 tokens of padding at the end count",
    ),
    "a mask without its padding": (
        {"response_mask": [1, 1], "attention_mask": [1, 1, 1, 0]},
        "field 'response_mask' has no entries for the padding at the end",
    ),
    "response mask": ({"response_mask": [1, 3]}, "field 'response_mask' must be a list of 0 and 1"),
    "two responses": ({"prompt_tokens": [1]}, "fields 'tokens' and 'prompt_tokens' are both given"),
    "env mask": ({"env_mask": [0, 0, 1, 1]}, "field 'env_mask' is not read, though its name says that"),
    "label ids": ({"label_ids": [5, 6, 7, 8]}, 'add {"labels": "label_ids"} to data.fields, or {"lab'),
    "log-probabilities": ({"ref_log_prob": [0] * 4}, 'add {"ref_logprobs": "ref_log_prob"} to data.fields'),
    "completion ids": (
        {"completion_ids": [7, 8]},
        "field 'completion_ids' is not read, and without a mask the prompt is scored too; give 'loss_mask' or",
    ),
    "prompt length": ({"prompt_length": 2}, "field 'prompt_length' is not read, and without a mask the prompt is"),
    "weights": ({"weights": [0, 0, 1, 1]}, 'add {"loss_mask": "weights"} to data.fields'),
    "weights beside labels": (
        {"labels": [-100, 6, 7, 8], "loss_scale": [0, 2, 1, 1]},
        "field 'loss_scale' is not read, though its name says that it is 'loss_mask'",
    ),
    "targets": ({"target_tokens": [6, 7, 8, 9]}, 'add {"labels": "target_tokens"} to data.fields'),
    "positions": ({"position_ids": [0, 1, 0, 1]}, "field 'position_ids' says that the row holds several samples"),
    "borders": ({"cu_seqlens": [0, 2, 4]}, "field 'cu_seqlens' says that the row holds several samples"),
    "lengths of several": ({"seq_lengths": [2, 2]}, "field 'seq_lengths' says that the row holds several samples"),
    "numbers": ({"segment_ids": [1, 1, 2, 2]}, "field 'segment_ids' says that the row holds several samples"),
    "left out by slime": (
        {"response_length": 2, "remove_sample": True},
        "field 'remove_sample' is not read, though it says that the sample is left out; give a 'loss_mask' of zeros",
    ),
    "left out by NeMo-RL": ({"loss_mask": [0, 0, 1, 1], "sample_mask": 0}, "field 'sample_mask' is not read, though"),
    "response length": ({"response_len": 2}, 'add {"response_length": "response_len"} to data.fields'),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", BAD)
def test_rows_that_contradict_themselves(tmp_path, case, form):
    fields, says = BAD[case]
    with pytest.raises(SampleError) as raised:
        read(tmp_path, TOKENS | fields, form=form)
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / f'rows.{form}'}")


def test_response_without_its_prompt(tmp_path):
    with pytest.raises(SampleError, match="field 'response_tokens' needs field 'prompt_tokens'"):
        read(tmp_path, {"response_tokens": [1]})
    with pytest.raises(SampleError, match="'response_tokens' and 'response_length' are both given"):
        read(tmp_path, {"prompt_tokens": [1], "response_tokens": [1], "response_length": 1})
    with pytest.raises(SampleError, match="field 'prompt_mask' is not read; give the prompt without padding"):
        read(tmp_path, {"prompt_tokens": [0, 1], "response_tokens": [1], "prompt_mask": [0, 1]})
    with pytest.raises(SampleError, match="field 'prompt_tokens' must be a flat list of integers"):
        read(tmp_path, {"prompt_tokens": [[0, 1]], "response_tokens": [[1]]})


MAPPINGS = {
    "hugging face": ({"input_ids": [1, 2], "labels": [1, 2]}, {"tokens": "input_ids"}),
    "vllm": (
        {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1.0]},
        {"prompt_tokens": "prompt_token_ids", "response_tokens": "token_ids", "rollout_logprobs": "logprobs"},
    ),
    "trl": (
        {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0], "env_mask": [1]},
        {
            "prompt_tokens": "prompt_ids", "response_tokens": "completion_ids", "rollout_logprobs": "logprobs",
            "loss_mask": "env_mask",
        },
    ),
    "verl": (
        {"prompt_ids": [1], "response_ids": [2], "response_mask": [1], "response_logprobs": [-1.0]},
        {"prompt_tokens": "prompt_ids", "response_tokens": "response_ids", "rollout_logprobs": "response_logprobs"},
    ),
    "verl's batches": (
        {"prompts": [1], "responses": [2], "ref_log_prob": [-1.0], "attention_mask": [1, 1]},
        {"prompt_tokens": "prompts", "response_tokens": "responses", "ref_logprobs": "ref_log_prob"},
    ),
    "verl's batches without prompts": (
        {"input_ids": [1, 2], "responses": [2], "response_mask": [1]},
        {"tokens": "input_ids", "responses": None},
    ),
    "ids": ({"token_ids": [1, 2]}, {"tokens": "token_ids"}),
    "beside texts": (
        {"prompt": "a", "response": "b", "prompt_ids": [1], "completion_ids": [2]},
        {"prompt_tokens": "prompt_ids", "response_tokens": "completion_ids"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", MAPPINGS)
def test_the_mapping_that_is_named_reads_the_row(tmp_path, case, form):
    row, mapping = MAPPINGS[case]
    with pytest.raises(SampleError) as raised:
        read(tmp_path, row, form=form)
    said = str(raised.value)
    named = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert named == mapping
    assert read(tmp_path, row, form=form, names=named)


def test_fields_without_effect_on_training_are_ignored(tmp_path):
    row = {"tokens": [1, 2], "special_tokens_mask": [1, 0], "token_type_ids": [0, 0], "mask_ratio": 0.5}
    row |= {"blog_posts": ["a"], "mask_names": ["a"], "finish_reason": "length", "prompt_logprobs": [-1.0]}
    assert one(tmp_path, row) == ([1, 2], [1, 1], {})
    padded = {"tokens": [0, 1, 2], "attention_mask": [0, 1, 1], "position_ids": [1, 0, 1], "segment_ids": [0, 1, 1]}
    padded |= {"cu_seqlens": [0, 2], "seq_lengths": [2], "remove_sample": False, "sample_mask": 1}
    assert one(tmp_path, padded) == ([1, 2], [1, 1], {})
    of_prompt = {"tokens": [1, 2], "prompt_length": 1, "response_length": 1, "remove_sample": 1, "loss_mask": [0]}
    assert one(tmp_path, of_prompt)[1] == [0, 0]
    # Our own mask takes precedence over others, and so does a mapping.
    assert one(tmp_path, {"tokens": [1, 2], "loss_mask": [0, 1], "token_mask": [1, 1]})[1] == [0, 1]
    row = {"tokens": [1, 2], "token_mask": [0, 1], "logprobs": [0, 0]}
    names = {"loss_mask": None, "rollout_logprobs": None}
    (sample,) = read_samples(write(tmp_path, [row], "jsonl"), names=FieldNames(given=names))
    assert content(sample) == ([1, 2], [1, 1], {})


def test_names_of_other_formats_are_ignored(tmp_path):
    """A conversation with its ids, as tokenized data sets keep it."""
    from data_sources import CharacterTokenizer

    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    row |= {"input_ids": [1, 2], "assistant_mask": [0, 1], "attention_mask": [1, 1]}
    for form in FORMS:
        assert len(read_samples(write(tmp_path, [row], form), tokenizer=CharacterTokenizer())) == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("old_log_probs", "old_logprobs"), ("ref_per_token_logps", "ref_logprobs"), ("logprobs", "rollout_logprobs"),
        ("reference_policy_logprobs", "ref_logprobs"), ("sampling_per_token_logps", "rollout_logprobs"),
        ("assistant_mask", "loss_mask"), ("label_ids", "labels"), ("labels_shifted", "labels"), ("labeler", None),
        ("OldLogProbs", "old_logprobs"), ("train-mask", "loss_mask"),
        ("blog_post", None), ("special_tokens_mask", None), ("id", None), ("log_problem", None),
    ],
)  # fmt: skip
def test_meanings_of_field_names(name, meant):
    assert meaning(name, of_tokens=True) == meant


@st.composite
def padded_rows(draw, kind):
    """A row without padding, and the same with padding and masks by other names."""
    length = draw(st.integers(1, 8))
    ids = st.integers(0, 9)
    tokens = draw(st.lists(ids, min_size=length, max_size=length))
    mask = draw(st.lists(st.sampled_from([0, 1]), min_size=length, max_size=length))
    number = st.floats(-8, 0, width=32)
    signals = {
        name: draw(st.lists(number, min_size=length, max_size=length))
        for name in draw(st.lists(st.sampled_from(PER_TOKEN), unique=True))
    }
    left, right = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    pad = draw(ids)

    def padded(values, fill):
        return [fill] * left + values + [fill] * right

    row = {"tokens": padded(tokens, pad)}
    if left or right or draw(st.booleans()):
        row["attention_mask"] = [kind(one) for one in padded([1] * length, 0)]
    row |= {name: padded(values, draw(st.sampled_from([0.0, -1.0]))) for name, values in signals.items()}
    ways = draw(st.lists(st.sampled_from(["loss_mask", "labels", "completion_mask", "response_mask"]), min_size=1))
    for way in ways:
        if way == "labels":
            labels = [token if scored else -100 for token, scored in zip(tokens, mask, strict=True)]
            row["labels"] = padded(labels, draw(st.sampled_from([-100, pad])))
        else:
            row[way] = padded(mask, 0)
    return {"tokens": tokens, "loss_mask": mask, **signals}, row


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([int, bool, float]).flatmap(lambda kind: st.lists(padded_rows(kind), min_size=1, max_size=3)),
    st.sampled_from(FORMS),
)
def test_padding_makes_no_difference(tmp_path_factory, rows, form):
    folder = tmp_path_factory.mktemp("rows")
    plain, padded = zip(*rows, strict=True)
    expected = [content(sample) for sample in read(folder, *plain)]
    assert [content(sample) for sample in read(folder, *padded, form=form)] == expected


@st.composite
def responses(draw):
    """A row with an entry for each token, and the same with fields that are as long as the response."""
    prompt, response = draw(st.lists(st.integers(0, 9), max_size=4)), draw(st.lists(st.integers(0, 9), min_size=1))
    length = len(response)
    mask = draw(st.lists(st.sampled_from([0, 1]), min_size=length, max_size=length))
    fields = {"loss_mask": mask}
    for name in draw(st.lists(st.sampled_from(PER_TOKEN), unique=True)):
        fields[name] = draw(st.lists(st.floats(-8, 0, width=32), min_size=length, max_size=length))
    long = {name: [0 if name == "loss_mask" else None] * len(prompt) + values for name, values in fields.items()}
    way = draw(st.sampled_from(["response_length", "response_mask", "response_tokens"]))
    row = {"tokens": prompt + response, "response_length": length}
    if way == "response_tokens":
        row = {"prompt_tokens": prompt, "response_tokens": response}
    elif way == "response_mask":
        row = {"tokens": prompt + response, "response_mask": fields["loss_mask"]}
    left = draw(st.integers(0, 2))
    if left:
        name = "prompt_tokens" if way == "response_tokens" else "tokens"
        row |= {name: [0] * left + row[name], "attention_mask": [0] * left + [1] * (len(prompt) + length)}
    either = {name: draw(st.sampled_from([values, [None] * left + long[name]])) for name, values in fields.items()}
    if way == "response_mask":
        del either["loss_mask"]
    elif None in either["loss_mask"]:
        either["loss_mask"] = fields["loss_mask"]
    return {"tokens": prompt + response, **long}, row | either


@settings(deadline=None, max_examples=60)
@given(responses(), st.sampled_from(FORMS))
def test_fields_of_a_response_make_no_difference(tmp_path_factory, rows, form):
    folder = tmp_path_factory.mktemp("rows")
    long, short = rows
    assert one(folder, short, form) == one(folder, long)
