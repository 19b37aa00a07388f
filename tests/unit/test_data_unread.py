"""Keys of records that nothing reads: all are named once, and those of known meaning are read or refused."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_sources import CharacterTokenizer
from harness.commands import write_rows

from mcore_prefix_tree.data import FieldNames, Skipped, read_samples
from mcore_prefix_tree.sample import SampleError

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TOOLS = [{"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}]


def read(tmp_path, *rows, **names):
    path = tmp_path / "data.jsonl"
    write_rows(path, rows)
    skipped = Skipped()
    names = FieldNames(**names)
    return read_samples(path, tokenizer=CharacterTokenizer(), names=names, skipped=skipped), skipped.not_read


def test_all_keys_that_are_not_read_are_named(tmp_path):
    message = {"role": "user", "content": "a", "id": 7, "empty": None}
    rows = [{"messages": [message, CHAT["messages"][1]], "source": "x", "lossmask": [1]}, CHAT | {"source": "y"}]
    _, told = read(tmp_path, *rows)
    assert told == "not read: source (2 of 2 records), lossmask (1; is loss_mask meant?), messages[].id (1)"
    _, told = read(tmp_path, {"tokens": [1, 2], "tools": [], "note": None})
    assert told == "not read: tools (1 of 1 records)"
    assert read(tmp_path, CHAT)[1] == ""


def test_columns_that_are_not_read_are_named(tmp_path):
    path, skipped = tmp_path / "data.parquet", Skipped()
    pyarrow.parquet.write_table(pa.table({"tokens": [[1, 2]] * 3, "groups": [3] * 3, "note": ["x"] * 3}), path)
    read_samples(path, skipped=skipped)
    assert skipped.not_read == "not read: groups (3 of 3 records; is group meant?), note (3)"


@pytest.mark.parametrize("name", ["tool_defs", "functions", "available_tools", "toolDefinitions", "tools_json", "apis"])
def test_tools_under_other_names_are_refused_or_mapped(tmp_path, name):
    for row in (CHAT | {name: TOOLS}, CHAT | {name: json.dumps(TOOLS), "tools": None}):
        with pytest.raises(SampleError, match=f"field '{name}' is not read, .* it is 'tools'.*data.fields"):
            read(tmp_path, row)
        assert read(tmp_path, row, given={"tools": name})[1] == ""
        assert read(tmp_path, row, given={"tools": None})[1] == f"not read: {name} (1 of 1 records)"
    assert read(tmp_path, CHAT | {name: []})


PAIR = {"prompt": CHAT["messages"][:1], "chosen": "b", "rejected": "c"}
WEIGHTS = ["weight", "loss_weight", "sample_weight", "example_weight"]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("row", [CHAT, {"tokens": [1, 2, 3]}, PAIR])
def test_weight_of_a_record_is_refused(tmp_path, name, row):
    for value in (0, 0.5, 2):
        with pytest.raises(SampleError, match=f"field '{name}' of the record is not read"):
            read(tmp_path, row | {name: value})
    assert read(tmp_path, row | {name: 1})
    assert read(tmp_path, row | {name: 0.5}, given={name: None})


@pytest.mark.parametrize(("name", "value"), [("train", False), ("masked", 1), ("loss", [0, 1]), ("train_on_turn", 0)])
def test_switch_of_a_record_is_refused(tmp_path, name, value):
    with pytest.raises(SampleError, match=f"field '{name}' of the record is not read"):
        read(tmp_path, CHAT | {name: value})


def test_pair_of_swift_is_a_pair(tmp_path):
    right = {"prompt": CHAT["messages"][:1], "chosen": CHAT["messages"][1:], "rejected": "c"}
    right["rejected"] = [{"role": "assistant", "content": "c"}]
    expected, _ = read(tmp_path, right)
    for rejected in ({"rejected_response": "c"}, {"rejected_messages": right["prompt"] + right["rejected"]}):
        samples, told = read(tmp_path, CHAT | rejected)
        assert told == ""
        for sample, other in zip(samples, expected, strict=True):
            assert sample.tokens.tolist() == other.tokens.tolist()
            assert (sample.signals.pair, sample.signals.chosen) == (other.signals.pair, other.signals.chosen)
    with pytest.raises(SampleError, match="field 'rejected_answer' is not read, though its name says"):
        read(tmp_path, CHAT | {"rejected_answer": "c"})


def test_question_is_rendered_once(tmp_path):
    question, said = CHAT["messages"]
    expected, _ = read(tmp_path, {"prompt": [question], "completion": [said]})
    samples, _ = read(
        tmp_path, {"prompt": [question], "completion": [question | {"content": [{"type": "text", "text": "a"}]}, said]}
    )
    assert samples[0].tokens.tolist() == expected[0].tokens.tolist()
    system = {"role": "system", "content": "s"}
    for row in (
        {"prompt": [question], "completion": [system, question, said]},
        {"prompt": "what is two and two", "completion": "what is two and two? four"},
    ):
        with pytest.raises(SampleError, match=r"field 'completion' (has a question|begins with the text) of 'prompt'"):
            read(tmp_path, row)


def test_system_beside_messages_is_read(tmp_path):
    system = {"role": "system", "content": "s"}
    expected, _ = read(tmp_path, {"messages": [system, *CHAT["messages"]]})
    for row in (CHAT | {"system": "s"}, {"messages": [system, *CHAT["messages"]], "system": "s"}):
        assert read(tmp_path, row)[0][0].tokens.tolist() == expected[0].tokens.tolist()
    with pytest.raises(SampleError, match="are different system messages"):
        read(tmp_path, {"messages": [system, *CHAT["messages"]], "system": "t"})


FORMATS = {
    "trl": {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -2.0], "advantages": 1.0},
    "verl": {
        "prompts": [1], "responses": [2, 3], "input_ids": [1, 2, 3], "response_mask": [1, 1],
        "attention_mask": [1, 1, 1], "rollout_log_probs": [-1.0, -2.0], "advantages": 1.0, "position_ids": [0, 1, 2],
    },
    "slime": {
        "tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-1.0, -2.0], "advantage": 1.0, "label": "4",
    },
    "vllm": {"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -2.0], "advantage": 1.0, "text": "x"},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_format_by_name_reads_its_fields(tmp_path, name):
    (sample,), _ = read(tmp_path, FORMATS[name], format=name)
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.loss_mask.tolist() == [0, 1, 1]
    assert sample.signals.rollout_logprobs.tolist()[1:] == [-1.0, -2.0]
    assert sample.signals.advantage == 1.0
    with pytest.raises(SampleError, match="'logprobs' and 'rollout_logprobs' are both read as"):
        read(tmp_path, FORMATS["vllm"] | {"rollout_logprobs": [0, 0]}, format="vllm")


def test_messages_may_have_other_names_of_keys(tmp_path):
    row = {"messages": [CHAT["messages"][0], CHAT["messages"][1] | {"step_loss_mask": 0}]}
    with pytest.raises(
        SampleError, match="step_loss_mask', which changes what is trained on, and is not read: call it 'loss'"
    ):
        read(tmp_path, row)
    for names in ({"format": "slime"}, {"given": {"loss": "step_loss_mask"}}):
        (sample,), _ = read(tmp_path, row, **names)
        assert not sample.is_scored
