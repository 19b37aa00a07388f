"""Files that are written are read back the same, for every kind, and are complete or absent."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_prefix_tree import Sample, SampleError, Signals
from mcore_prefix_tree.data import EncodedTurn, FieldNames, read_samples, tables
from mcore_prefix_tree.data.jsonl import JsonText
from mcore_prefix_tree.data.write import check_output, check_rows_output, make_row, rows_file
from mcore_prefix_tree.sample import Tempered
from mcore_prefix_tree.signals import Teacher
from mcore_prefix_tree.utils.errors import format_error

NAN = float("nan")
KINDS = ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.arrow", "rows.feather", "rows.txt"]


def teacher(n: int) -> Teacher:
    return Teacher(
        token_ids=np.array([[1, 2]] * n, dtype=np.int32), logprobs=np.array([[-1.0, -2.5]] * n, dtype=np.float32)
    )


SAMPLES = [
    Sample(tokens=[1, 2, 3], source="f:1"),
    Sample(tokens=[4], loss_mask=[0.25], merge_key="warm", source="f:2", signals=Signals(group="é\n", turn=0)),
    Sample(
        tokens=[1, 2, 3, 4],
        loss_mask=[0, 0.5, 0, 1],
        merge_key=Tempered(temperature=0.7, key="warm"),
        source="f:3",
        signals=Signals(
            reward=1.5,
            group="p",
            rollout=2**53,
            turn=3,
            advantage=np.array([NAN, -1.5, NAN, 0.1]),
            old_logprobs=np.array([NAN, -0.1, NAN, -1 / 3], dtype=np.float32),
            ref_logprobs=np.array([NAN, -0.1, NAN, -1 / 3]),
            values=[None, 1.0, None, 2.0],
            pair=7,
            chosen=False,
            label=True,
            mismatched=True,
            teacher=teacher(4),
        ),
    ),
    Sample(tokens=[1, 2], source="f:4", signals=Signals(ref_logprobs=np.array([0, -1], dtype=np.float32), rollout=0)),
]
ROWS = [make_row(sample) for sample in SAMPLES]


def write(path, rows, at_once):
    with rows_file(path) as writer:
        for start in range(0, len(rows), at_once):
            writer.add(rows[start : start + at_once])
    return path


def same(one, other):
    assert repr(one) == repr(other) or np.array_equal(one, other, equal_nan=True), (one, other)


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("name", KINDS)
def test_all_sample_fields_are_read_back(tmp_path, name, at_once):
    path = write(tmp_path / name, ROWS, at_once)
    assert os.listdir(tmp_path) == [name]
    back = read_samples(path)
    assert len(back) == len(SAMPLES)
    for old, new in zip(SAMPLES, back, strict=True):
        assert old.tokens.tolist() == new.tokens.tolist()
        assert old.loss_mask.tobytes() == new.loss_mask.tobytes()
        assert old.merge_key == new.merge_key
        given, found = vars(old.signals), vars(new.signals)
        if given["teacher"] is not None:
            for field in ("token_ids", "logprobs"):
                same(getattr(given["teacher"], field), getattr(found["teacher"], field))
        for field in given.keys() - {"teacher"}:
            if isinstance(given[field], np.ndarray):
                # Which numbers are doubles is not kept: a column has one type, and JSON none.
                np.testing.assert_array_equal(found[field], given[field].astype(found[field].dtype))
            else:
                assert given[field] == found[field], field


@pytest.mark.parametrize("at_once", [1, 100])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_tables_hold_the_same_rows_as_lines(tmp_path, name, at_once):
    lines = [json.loads(line) for line in write(tmp_path / "rows.jsonl", ROWS, 9).read_text().splitlines()]
    path = write(tmp_path / name, ROWS, at_once)
    table = pq.read_table(path) if name.endswith(".parquet") else pa.ipc.open_file(path).read_all()
    rows = [{field: value for field, value in row.items() if value is not None} for row in table.to_pylist()]
    for row in rows:
        row.pop("mismatched", None)
    for line in lines:
        line.pop("mismatched", None)
    assert rows == lines
    assert table.schema.field("tokens").type == pa.list_(pa.int32())
    assert table.schema.field("old_logprobs").type == pa.list_(pa.float32())
    assert table.schema.field("ref_logprobs").type == pa.list_(pa.float64()), "single and double are double together"


def test_parts_have_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PART_BYTES", 40_000)
    rows = [{"source": f"f:{number}", "tokens": np.arange(1000, dtype=np.int32)} for number in range(95)]
    table = pq.ParquetFile(write(tmp_path / "rows.parquet", rows, 3))
    groups = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    assert groups == [12] * 7 + [11]
    assert table.read(["source"])["source"].to_pylist() == [row["source"] for row in rows]


@pytest.mark.parametrize("at_once", [1, 9])
@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ({"group": "a"}, {"group": 1}, "field 'group' cannot be a column of a table ("),
        ({"merge_key": True}, {"merge_key": 1}, "field 'merge_key' cannot be a column of a table ("),
        ({"reward": 1.0}, {"reward": np.ones(2)}, "field 'reward' cannot be a column of a table ("),
        ({"reward": np.ones(2)}, {"reward": 1.0}, "field 'reward' cannot be a column of a table ("),
        ({"info": JsonText("[1]")}, {"info": JsonText('{"a": 1}')}, "field 'info' cannot be a column of a table ("),
        ({"group": 1}, {"group": 2**70}, "'group' cannot be a column of a table"),
        ({"group": 0.5}, {"group": 2**60 + 1}, "cannot be a column of a table"),
    ],
)
def test_error_names_values_of_mixed_types(tmp_path, at_once, one, other, says):
    rows = [
        {"source": f"f:{number}", "tokens": np.ones(2, dtype=np.int32)} | more
        for number, more in enumerate([one, {}, other])
    ]
    with pytest.raises(SampleError) as raised:
        write(tmp_path / "rows.parquet", rows, at_once)
    assert says in str(raised.value)
    assert str(raised.value).endswith("write JSON Lines (a name that ends in .jsonl)")
    assert not os.listdir(tmp_path)
    assert len(write(tmp_path / "rows.jsonl", rows, at_once).read_text().splitlines()) == 3


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("before", [None, "earlier content of it"])
def test_interrupt_leaves_no_file(tmp_path, name, before):
    path = tmp_path / name
    if before:
        path.write_text(before)

    def interrupted():
        with rows_file(path) as writer:
            writer.add(ROWS)
            assert [other for other in os.listdir(tmp_path) if other.endswith(name)] == ([name] if before else [])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ([name] if before else [])
    assert not before or path.read_text() == before


def test_link_is_kept(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    write(tmp_path / "link.jsonl", ROWS, 2)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(ROWS)


def test_non_finite_values_are_null_in_lines(tmp_path):
    """For unscored tokens: the reader rejects it for others."""
    signals = Signals(rollout_logprobs=[float("-inf"), float("nan"), -1.0])
    sample = Sample(tokens=[1, 2, 3], loss_mask=[0, 0, 1], signals=signals)
    (line,) = write(tmp_path / "rows.jsonl", [make_row(sample)], 1).read_text().splitlines()
    assert json.loads(line)["rollout_logprobs"] == [None, None, -1.0]


def test_packed_lines_are_packed(tmp_path):
    with gzip.open(write(tmp_path / "rows.jsonl.gz", ROWS, 2), "rt") as stream:
        assert len(stream.readlines()) == len(ROWS)


def test_unwritable_output_is_rejected_before_work(tmp_path, monkeypatch):
    check_output(tmp_path / "rows.parquet")
    (tmp_path / "file").touch()
    for path, says in [
        (tmp_path / "no" / "rows.jsonl", "its folder does not exist or cannot be written to; create it, or name"),
        (tmp_path / "file" / "rows.jsonl", "its folder does not exist or cannot be written to; create it, or name"),
        (tmp_path, "exists and is not a regular file; name another"),
        ("/dev/null", "/dev/null: exists and is not a regular file; name another"),
    ]:
        with pytest.raises(ValueError, match=says):
            check_output(path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ValueError, match="its folder does not exist or cannot be written to"):
        check_output(tmp_path / "rows.jsonl")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check_output(tmp_path / "rows.jsonl")
    for name in ("rows.parquet", "rows.arrow", "rows.feather"):
        with pytest.raises(ImportError, match=r"need pyarrow: pip install 'pyarrow>=16'"):
            check_output(tmp_path / name)


@pytest.mark.parametrize("name", ["z.jsonl", "z.jsonl.gz", "z.parquet", "z.arrow"])
def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, name):
    rows = [{"source": "x", "tokens": np.random.default_rng(row).integers(0, 9, 400)} for row in range(20)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error, rows_file(tmp_path / name) as writer:
            writer.add(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert format_error(error.value) == f"{tmp_path / name}: cannot be written: File too large"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["data.jsonl", "./data.jsonl", "*.jsonl", "link.jsonl"])
def test_input_files_are_rejected_as_output(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to("data.jsonl")
    with pytest.raises(ValueError, match=r"data\.jsonl: is read by this command, which would replace it"):
        check_output(tmp_path / "data.jsonl", ["-", "missing", given])
    check_output(tmp_path / "new.jsonl", [given])


@pytest.mark.parametrize("name", ["z.csv", "z.txt", "z", "z.gz", "z.parquet.gz", "z.csv.gz", "jsonl"])
def test_a_name_that_promises_other_contents_is_refused(tmp_path, name):
    says = "give a name that ends in .jsonl, .json, .jsonl.gz, .json.gz (JSON Lines), .parquet, .arrow or .feather"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path / name}: {says}')}$"):
        check_rows_output(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["z.jsonl", "z.json", "z.JSONL", "z.JSONL.GZ", "z.a.jsonl.gz", "z.json.gz", "z.Parquet", "z.feather"]
)
def test_names_with_a_known_suffix_pass(tmp_path, name):
    check_rows_output(tmp_path / name)


UNKNOWN = (
    '"note": "\\u00e9 \\"x\\"", "empty": {}, "nul": null, "n": 1.50, "big": 123456789012345678901234567890, '
    '"e": 1e2, "deep": {"b": [1, {"a" : null}], "a": -0.0}, "nan": NaN, "é": "ö", "source": 7, "prompt": "of tokens"'
)


@pytest.mark.parametrize(
    "known", ['"tokens": [1, 2]', '"messages": [{"role": "assistant", "content": "a"}], "tools": []']
)
def test_lines_keep_unread_fields_byte_for_byte(tmp_path, known):
    class Letter:
        name, vocab_size = "letter", 9

        def encode_turns(self, messages, tools=()):
            return [EncodedTurn(tokens=np.array([1, 2], dtype=np.int32), start=1)]

    (tmp_path / "in.jsonl").write_text(f'{{{known},{UNKNOWN}, "reward": 2}}\n', encoding="utf-8")
    names = FieldNames(keeps_others=True)
    samples = read_samples(tmp_path / "in.jsonl", names=names, tokenizer=Letter())
    write(tmp_path / "out.jsonl", [make_row(sample) for sample in samples], 1)
    text = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    given = read_samples(tmp_path / "in.jsonl", names=names, tokenizer=Letter())[0].carried
    assert list(given) == ["note", "empty", "nul", "n", "big", "e", "deep", "nan", "é", "source", "prompt"]
    for name, value in given.items():
        assert f": {value}" in text
        assert f"{value}" in UNKNOWN
        assert f"{json.dumps(name)}: {value}" in text
    assert "messages" not in text
    assert "tools" not in text
    assert json.loads(text)["reward"] == 2
    assert read_samples(tmp_path / "in.jsonl", tokenizer=Letter())[0].carried == {}


ODD = {
    "when": pa.array([1, None], pa.timestamp("us", "UTC")),
    "price": pa.array([None, "1.20"]).cast(pa.decimal128(5, 2)),
    "bytes": pa.array([b"\xff", b""], pa.binary()),
    "kind": pa.array(["a", "b"]).dictionary_encode(),
    "info": pa.array([{"i": 1, "s": None}, None], pa.struct([("i", pa.int8()), ("s", pa.string())])),
    "none": pa.nulls(2),
    "source": pa.array([3, 4]),
}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_tables_keep_unread_columns_and_their_types(tmp_path, name, at_once):
    table = pa.table({"ids": [[1, 2], [3]], **ODD, "tokens": ["not", "ours"]})
    pq.write_table(table, tmp_path / "in.parquet")
    names = FieldNames(given={"tokens": "ids"}, keeps_others=True)
    samples = read_samples(tmp_path / "in.parquet", names=names)
    path = write(tmp_path / name, [make_row(sample, names) for sample in samples], at_once)
    back = pq.read_table(path) if name.endswith(".parquet") else pa.ipc.open_file(path).read_all()
    assert set(back.column_names) == {*table.column_names, "loss_mask"}
    for column in table.column_names:
        if column != "ids":
            assert back[column].to_pylist() == table[column].to_pylist()
            assert back.schema.field(column).type == table.schema.field(column).type, column
    again = read_samples(path, names=FieldNames(given={"tokens": "ids"}))
    assert [one.tokens.tolist() for one in again] == [[1, 2], [3]]


def test_from_lines_to_a_table_and_back(tmp_path):
    names = FieldNames(keeps_others=True)
    (tmp_path / "in.jsonl").write_text(
        '{"tokens": [1], "info": {"a": [1.5]}}\n{"tokens": [2], "info": null, "b": "c"}\n'
    )
    rows = [make_row(sample) for sample in read_samples(tmp_path / "in.jsonl", names=names)]
    path = write(tmp_path / "rows.parquet", rows, 1)
    assert pq.read_table(path)["info"].to_pylist() == [{"a": [1.5]}, None]
    back = write(tmp_path / "back.jsonl", [make_row(sample) for sample in read_samples(path, names=names)], 1)
    assert [json.loads(line)["info"] for line in back.read_text().splitlines()] == [{"a": [1.5]}, None]


def test_lines_cannot_hold_all_that_tables_can(tmp_path):
    pq.write_table(pa.table({"tokens": [[1]], "when": ODD["when"][:1]}), tmp_path / "in.parquet")
    rows = [make_row(one) for one in read_samples(tmp_path / "in.parquet", names=FieldNames(keeps_others=True))]
    with pytest.raises(SampleError, match=r"in.parquet row 0: field 'when' is timestamp.*, which JSON Lines"):
        write(tmp_path / "out.jsonl", rows, 1)
    assert not (tmp_path / "out.jsonl").exists()
