from __future__ import annotations

import json
import logging

import pyarrow as pa
import pyarrow.parquet
import pytest

from mcore_prefix_tree.data import fields, read_samples


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(fields, "_seen", set())


@pytest.mark.parametrize(
    ("name", "meant"), [("lossmask", "loss_mask"), ("rewards", "reward"), ("old_log_probs", "old_logprobs")]
)
def test_misspelled_field_is_reported_once(tmp_path, caplog, name, meant):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps({'tokens': [1, 2], 'id': 7, name: 1})}\n" * 3)
    assert len(read_samples(path)) == 3
    assert caplog.messages == [f"{path}:1: field '{name}' is not read; is '{meant}' meant?"]


def test_misspelled_column_is_reported(tmp_path, caplog):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pa.table({"tokens": [[1, 2]], "groups": [3], "note": ["x"]}), path)
    assert len(read_samples(path)) == 1
    assert caplog.messages == [f"{path}: field 'groups' is not read; is 'group' meant?"]


def test_other_ranks_and_other_names_are_quiet(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1, 2], "id": 7, "prompt": "a", "length": 2, "reward_model": "x"}\n')
    read_samples(path)
    monkeypatch.setenv("RANK", "3")
    path.write_text('{"tokens": [1, 2], "lossmask": 1}\n')
    read_samples(path)
    assert caplog.messages == []
