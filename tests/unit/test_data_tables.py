"""Parquet and Arrow: the samples of the same rows as JSON Lines, in order and by number; and rejected rows."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from data_sources import CHAT, CharacterTokenizer, write_table
from harness.commands import run_command, write_rows
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import LineOptions, StreamedGroups, read_samples, tables
from mcore_prefix_tree.data.fields import OUR_NAMES
from mcore_prefix_tree.data.tables import RecentChunks, RowIndex, read_rows
from mcore_prefix_tree.data.write import rows_file

FORMATS = ["parquet", "arrow", "arrow-lz4", "feather", "stream"]
OPTIONS = LineOptions(tokenizer=CharacterTokenizer(), expand_turns=True, vocab_size=128, limits={"the limit": 30})
KEYWORDS = dict(vars(OPTIONS))


def write_lines(folder, rows):
    return str(write_rows(Path(folder) / "rows.jsonl", rows))


def told(samples):
    return [
        (
            s.tokens.tolist(),
            s.loss_mask.tolist(),
            s.merge_key,
            repr(_single(s.signals)),
            s.source.partition(" turn ")[1:],
        )
        for s in samples
    ]


def _single(signals):
    """Per-token numbers as JSON Lines give them, and rollouts without their file."""
    fields = {name: value for name, value in vars(signals).items() if name != "rollout" or isinstance(value, int)}
    return {
        name: value.astype(np.float32).tolist() if isinstance(value, np.ndarray) else str(value)
        for name, value in fields.items()
    }


SIGNALS = {
    "tokens": [1, 2, 3],
    "loss_mask": [0, 1, 0.5],
    "merge_key": "policy-7",
    "temperature": 0.5,
    "reward": 1.5,
    "group": "p7",
    "rollout": 3,
    "turn": 0,
    "advantage": [None, 0.5, -0.5],
    "old_logprobs": [None, -0.5, -1.0],
    "ref_logprobs": [0.0, -0.25, -1.0],
    "rollout_logprobs": [0.0, -0.75, -1.0],
    "values": [0.0, 1.0, 2.0],
    "returns": [0.0, 3.0, 4.0],
    "pair": 9,
    "chosen": False,
    "label": True,
    "mismatched": True,
    "teacher": {"token_ids": [[1, 2]] * 3, "logprobs": [[-1.0, -2.0]] * 3},
    "note": {"ignored": [1]},
}
BARE = {"tokens": [4, 5]}
TOOLS = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "function": {"name": "look", "arguments": '{"at": 1}'}, "name": None}],
    },
    {"role": "tool", "content": "seen", "name": "look"},
    {"role": "assistant", "content": "ok"},
]


@pytest.mark.parametrize("form", FORMATS)
def test_every_field_is_that_of_json_lines(tmp_path, form):
    rows = [SIGNALS, BARE, SIGNALS | {"advantage": [0.0, 1.0, 2.0], "merge_key": None, "group": None}]
    path = write_table(tmp_path, rows, form)
    samples = read_samples(path)
    assert told(samples) == told(read_samples(write_lines(tmp_path, rows)))
    assert [sample.source for sample in samples] == [f"{path} row {number}" for number in range(3)]
    assert samples[0].signals.teacher.logprobs.dtype == np.float32
    assert not samples[0].tokens.flags.writeable


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("expand_turns", [False, True])
def test_conversations(tmp_path, form, expand_turns):
    schema = '{"type": "object"}'
    told_of = [
        {"type": "function", "function": {"name": "find", "description": "It finds.", "parameters": schema}},
        {"type": "function", "function": {"name": "now", "description": None, "parameters": None}},
    ]
    rows = [
        {"messages": CHAT, "tools": None, "reward": [1.0, 2.0], "tokens": None},
        {"messages": TOOLS, "tools": told_of, "reward": None, "tokens": None},
        {"messages": None, "tools": None, "reward": [0.5], "tokens": [7, 8]},
        {"messages": CHAT[:2], "tools": [], "reward": [3.0], "tokens": None},
    ]
    seen = []

    class Recorder(CharacterTokenizer):
        def encode_turns(self, messages, tools=()):
            seen.append((messages, tools))
            return super().encode_turns(messages)

    path = write_table(tmp_path, rows, form)
    kept = [{name: value for name, value in row.items() if value is not None} for row in rows]
    nulls = re.compile(', "(name|description|parameters)": null')
    lines = write_lines(tmp_path, [json.loads(nulls.sub("", json.dumps(row))) for row in kept])
    both = [read_samples(p, tokenizer=Recorder(), expand_turns=expand_turns) for p in (path, lines)]
    assert told(both[0]) == told(both[1])
    assert seen[:3] == seen[3:]
    assert [[tool.name for tool in tools] for _, tools in seen[:3]] == [[], ["find", "now"], []]
    assert len(both[0]) == (6 if expand_turns else 4)


numbers = st.floats(-100, 100, width=32)


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 127), st.one_of(st.none(), numbers), st.sampled_from([0.0, 0.5, 1.0])), min_size=1
        ),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from(FORMATS),
    st.sampled_from([pa.int32(), pa.int64(), pa.uint16()]),
    st.sampled_from([pa.float32(), pa.float64()]),
    st.sampled_from([pa.list_, pa.large_list, pa.list_view]),
    st.integers(1, 4),
)
def test_types_of_columns(tmp_path_factory, rows, form, integers, floats, make_list, rows_a_chunk):
    if make_list is pa.list_view and form in ("parquet", "feather"):
        make_list = pa.list_  # these have no list views
    rows = [
        # An entry is null only if its token is not scored.
        {
            "tokens": [token for token, _, _ in row],
            "loss_mask": [0.0 if number is None else mask for _, number, mask in row],
            "values": [number for _, number, _ in row],
        }
        for row in rows
    ]
    schema = pa.schema({"values": make_list(floats), "tokens": make_list(integers), "loss_mask": make_list(floats)})
    folder = tmp_path_factory.mktemp("tables")
    path = write_table(folder, pa.Table.from_pylist(rows, schema), form, rows_a_chunk=rows_a_chunk)
    expected = told(read_samples(write_lines(folder, rows)))
    assert told(read_samples(path)) == expected
    streamed = StreamedGroups(path, LineOptions())
    assert told(chain.from_iterable(streamed[::-1])) == expected[::-1]


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_arrays_of_arrows_own(tmp_path, form):
    """No list of Python numbers is made on the way, and nothing is copied before the sample's own arrays."""
    row = {"tokens": [1, 2, 3], "loss_mask": [True, False, True], "old_logprobs": [0.5, None, 1.0]}
    row["teacher"] = SIGNALS["teacher"]
    ((fields, _),) = [row.fields(OUR_NAMES) for row in read_rows(write_table(tmp_path, [row], form))]
    teacher = fields.pop("teacher")
    assert {type(value) for value in [*fields.values(), *teacher.values()]} == {np.ndarray}
    assert fields["loss_mask"].tolist() == row["loss_mask"]
    assert teacher["token_ids"].shape == (3, 2)
    assert not fields["tokens"].flags.owndata


def test_fixed_sizes_dictionaries_and_decimals(tmp_path):
    table = pa.table(
        {
            "tokens": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
            "merge_key": pa.array(["a", "a"]).dictionary_encode(),
            "reward": pa.array([0.5, None], pa.float16() if hasattr(np, "float16") else pa.float32()),
            "blob": pa.array([b"\xff", b""]),
        }
    )
    for form in FORMATS:
        samples = read_samples(write_table(tmp_path, table, form, name=form))
        assert [s.tokens.tolist() for s in samples] == [[1, 2], [3, 4]]
        assert [s.merge_key for s in samples] == ["a", "a"]
        assert [s.signals.reward for s in samples] == [0.5, None]


BAD = [
    ({"tokens": []}, "field 'tokens' is empty"),
    ({"tokens": "abc"}, "field 'tokens' must be a flat list of integers"),
    ({"tokens": [1.0, 2.0]}, "field 'tokens' must be a flat list of integers"),
    ({"tokens": [True]}, "field 'tokens' must be a flat list of integers"),
    ({"tokens": [[1], [2]]}, "field 'tokens' must be a flat list of integers"),
    ({"tokens": [[1], [2, 3]]}, "field 'tokens' must be a flat list of integers, but index 0"),
    ({"tokens": [1, None]}, "field 'tokens' must be a flat list of integers, but index 1 is null"),
    ({"tokens": [1, -2]}, "field 'tokens' has -2 at index 1; token ids are 0 to 2147483647"),
    ({"tokens": [2**40]}, f"field 'tokens' has {2**40} at index 0"),
    ({"tokens": [1, 128]}, "field 'tokens' has 128 at index 1, outside the model's vocabulary of 128"),
    ({"tokens": [1] * 31}, "the sample has 31 tokens, but the limit is 30"),
    ({"tokens": [1, 2], "loss_mask": [1.0]}, "field 'loss_mask' has 1 entries but 'tokens' has 2"),
    ({"tokens": [1, 2], "loss_mask": [1.0, None]}, "field 'loss_mask' has nan at index 1"),
    ({"tokens": [1], "loss_mask": "1"}, "field 'loss_mask' must be a flat list of numbers"),
    ({"tokens": [1], "merge_key": b"a"}, "field 'merge_key' must be a string, a finite number or a boolean"),
    ({"tokens": [1], "merge_key": [1]}, "field 'merge_key' must be a string"),
    ({"tokens": [1], "temperature": "hot"}, "field 'temperature' must be a valid number, not \"hot\""),
    ({"tokens": [1], "group": b"a"}, "field 'group' must be a string, a finite number or a boolean"),
    ({"tokens": [1, 2], "old_logprobs": [0.0, None]}, "field 'old_logprobs' has nan at index 1"),
    ({"tokens": [1, 2], "old_logprobs": [False, True]}, "field 'old_logprobs' must be numbers, not true or false"),
    ({"tokens": [1, 2], "old_logprobs": [False, None]}, "field 'old_logprobs' must be numbers, not true or false"),
    ({"tokens": [1], "teacher": [[1]]}, "field 'teacher' must be an object"),
    (
        {"tokens": [1, 2], "teacher": {"token_ids": [[1], [2, 3]], "logprobs": [[0.0], [0.0]]}},
        "must both be 2 lists of k",
    ),
    ({"tokens": None, "messages": None}, "has none of the fields 'tokens', 'messages'"),
    ({"tokens": [1], "messages": CHAT}, "has the fields 'tokens' and 'messages'"),
    ({"messages": "hi"}, "field 'messages' must be a list of at least one chat message"),
    ({"messages": [{"role": b"x", "content": "a"}]}, "field 'messages[0].role' must be"),
    (
        {"messages": [{"role": "user", "content": b"a"}]},
        "field 'messages[0].content' must be a valid string, not \"b'a'\"",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"b": b"x"}}]}]},
        "field 'messages[0].tool_calls[0].arguments' cannot be written as JSON",
    ),
    ({"messages": CHAT, "advantage": [1.0]}, "field 'advantage' must be a single number with 'messages'"),
    ({"messages": CHAT, "reward": [1.0]}, "field 'reward' has 1 entries, but 'messages' has 2 assistant turns"),
]


@pytest.mark.parametrize(("row", "says"), BAD, ids=[says[:40] for _, says in BAD])
@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_mistakes_are_named(tmp_path, row, says, form):
    path = write_table(tmp_path, [row], form)
    for read in (lambda: read_samples(path, **KEYWORDS), lambda: StreamedGroups(path, OPTIONS)):
        with pytest.raises(SampleError) as raised:
            read()
        assert str(raised.value).startswith(f"{path} row 0")
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)


def test_arguments_of_tools_are_json(tmp_path):
    """Whose lists are lists, and whose keys are those of this call, not of all."""
    calls = [{"name": "f", "arguments": {"at": [1, 2]}}, {"name": "g", "arguments": {"by": 0.5}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}]} for call in calls]
    heard = []

    class Recorder(CharacterTokenizer):
        def encode_turns(self, messages, tools=()):
            heard.extend(call.arguments for message in messages for call in message.tool_calls)
            return super().encode_turns(messages)

    read_samples(write_table(tmp_path, rows, "parquet"), tokenizer=Recorder())
    assert heard == ['{"at": [1, 2]}', '{"by": 0.5}']


def test_text_that_is_no_text(tmp_path):
    key = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    path = write_table(tmp_path, pa.table({"tokens": [[1]], "merge_key": key}), "arrow")
    with pytest.raises(SampleError, match=r"rows\.arrow: cannot be read from row 0 on: .*UTF8"):
        read_samples(path)


GOOD = [{"tokens": [number, number + 1, 3], "note": "x"} for number in range(1, 8)]


@pytest.mark.parametrize("form", FORMATS)
def test_an_index_finds_every_row(tmp_path, form):
    index = RowIndex(write_table(tmp_path, GOOD, form), RecentChunks())
    assert [index.read(number).source.rpartition(" ")[2] for number in range(len(index))] == [*map(str, range(7))]


@pytest.mark.parametrize("form", FORMATS)
def test_a_chunk_that_is_too_large_is_refused(tmp_path, form, monkeypatch):
    monkeypatch.setattr(tables, "CACHE_BYTES", 1 << 20)
    rows = [{"tokens": np.arange(100_000) % 100} for _ in range(4)]
    path = write_table(tmp_path, rows, form, rows_a_chunk=2)
    assert len(read_samples(path)) == 4
    if form in ("arrow", "stream"):
        assert StreamedGroups(path, LineOptions()).sizes.tolist() == [1] * 4  # mapped
        return
    with pytest.raises(SampleError, match="rows 0 to 1 are one part of the file and more than 1 MiB unpacked, and str"):
        StreamedGroups(path, LineOptions(), on_error="skip")
    path = write_table(tmp_path, rows, form, rows_a_chunk=1)
    assert StreamedGroups(path, LineOptions()).sizes.tolist() == [1] * 4


@pytest.mark.parametrize(
    "column",
    [
        {"tokens": [np.arange(1_000_000, dtype=np.int32) % 1000] * 20},
        {"tokens": [np.arange(1_000_000, dtype=np.uint8)] * 20},
        {"messages": [[{"role": "user", "content": "again " * 4000}]] * 3000},
        {"tokens": [[1]] * 9, "teacher": [{"logprobs": np.zeros((1, 10**6)).tolist()}] * 9},
    ],
    ids=["tokens", "short tokens", "text", "teacher"],
)
def test_a_row_group_that_is_too_large_is_not_unpacked(tmp_path, column, monkeypatch):
    """Here as in practice the file is small: a dictionary holds equal values once."""
    monkeypatch.setattr(tables, "CACHE_BYTES", 1 << 22)
    path = write_table(tmp_path, pa.table(column), "parquet", rows_a_chunk=10_000)
    assert Path(path).stat().st_size < 3 << 20
    usual, counting = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    try:
        pa.set_memory_pool(counting)
        with pytest.raises(
            SampleError, match=f"^{path}: rows 0 to {len(next(iter(column.values()))) - 1} are one part"
        ):
            StreamedGroups(path, OPTIONS)
    finally:
        pa.set_memory_pool(usual)
    assert counting.max_memory() < 18 << 20  # of text it decodes a few hundred rows at once


def test_columns_that_are_not_read_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CACHE_BYTES", 1 << 20)
    long = np.zeros(100_000)
    columns = {
        "map": pa.array([[("a", long)]] * 2, pa.map_(pa.string(), pa.list_(pa.float64()))),
        "nothing": pa.nulls(2),
        "times": pa.array([long.astype("datetime64[ms]")] * 2, pa.list_(pa.timestamp("ms"))),
        "words": pa.array(["a", "b"]).dictionary_encode(),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2, 300, 300))),
        "tokens": pa.array([[1, 2]] * 2),
        "more": pa.array([{"deep": [{"x": long, "y": None}]}] * 2),
    }
    for names in (list(columns), list(columns)[::-1]):
        path = write_table(tmp_path, pa.table({name: columns[name] for name in names}), "parquet")
        assert StreamedGroups(path, LineOptions()).sizes.tolist() == [1, 1]


def test_recent_chunks_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(tables, "CACHE_BYTES", 310_000)
    recent, loads = RecentChunks(), []

    def use(chunk, size=10_000):
        return recent.get(("file", chunk), lambda: loads.append(chunk) or ({"chunk": chunk}, size))["chunk"]

    assert [use(chunk) for chunk in (0, 1, 2, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]
    assert loads == [0, 1, 2]
    use(3), use(0), use(4)  # each 10,000 and an overhead: the one used longest ago goes
    use(0)
    assert loads == [0, 1, 2, 3, 4]
    use(1)
    assert loads == [0, 1, 2, 3, 4, 1]
    use(9, size=10**6)
    use(9)
    assert loads[-2:] == [1, 9]
    assert pickle.loads(pickle.dumps(recent)).get(("file", 9), lambda: ("another", 1)) == "another"


@pytest.mark.parametrize("name", ["cut.parquet", "cut.arrow", "empty.parquet", "empty.arrow", "text.feather"])
def test_files_that_are_no_tables_are_rejected(tmp_path, name):
    path = tmp_path / name
    content = {
        "cut": Path(write_table(tmp_path, GOOD, name.partition(".")[2].replace("feather", "arrow"))).read_bytes()
    }
    path.write_bytes({"empty": b"", "text": b'{"tokens": [1]}\n', "cut": content["cut"][:-20]}[name.partition(".")[0]])
    for read in (read_samples, lambda path: StreamedGroups(path, OPTIONS)):
        with pytest.raises(SampleError) as raised:
            read(str(path))
        assert str(raised.value).startswith(f"{path}: cannot be read")


@pytest.mark.parametrize("form", FORMATS)
def test_tables_without_samples(tmp_path, form):
    path = write_table(tmp_path, pa.table({"input_ids": [[1]], "text": ["a"]}), form)
    none = write_table(tmp_path, pa.table({"tokens": pa.array([], pa.list_(pa.int32()))}), form, name="none")
    for read in (read_samples, lambda path: StreamedGroups(path, OPTIONS)):
        with pytest.raises(SampleError, match=r"none of the columns tokens, messages, .*, only input_ids, text; "):
            read(path)
        with pytest.raises(SampleError, match=r"no samples; there are no records$"):
            read(none)


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_a_column_that_is_there_twice(tmp_path, form):
    table = pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=["tokens", "tokens"])
    with pytest.raises(SampleError, match=r"rows\.\w+: has the column 'tokens' twice; drop one of them"):
        read_samples(write_table(tmp_path, table, form))


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write_table(tmp_path, GOOD, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run_command("inspect", path)
    assert result.exit_code == 2
    assert result.stderr == (f"error: {path}: Parquet and Arrow files need pyarrow: pip install 'pyarrow>=16'\n")
    with pytest.raises(ImportError, match=r"rows\.parquet: Parquet and Arrow files need pyarrow"):
        StreamedGroups(path, OPTIONS)


def test_json_lines_do_not_load_pyarrow(tmp_path):
    path = write_lines(tmp_path, GOOD)
    script = f"import sys; from mcore_prefix_tree.data import read_samples; read_samples({path!r})"
    assert subprocess.run([sys.executable, "-c", f"{script}; assert 'pyarrow' not in sys.modules"]).returncode == 0


@pytest.mark.parametrize("form", FORMATS)
def test_commands_take_tables(tmp_path, form):
    path = write_table(tmp_path, [SIGNALS, BARE, {"tokens": [1, 2, 9]}], form)
    inspected = json.loads(run_command("inspect", "--json", path).stdout)
    assert (inspected["logical_tokens"], inspected["longest_sample"]) == (8, f"{path} row 0")
    planned = run_command("plan", "--json", "--max-tokens", "2", "--on-error", "skip", path)
    assert json.loads(planned.stdout)["skipped"] == 2
    assert (
        f"skipped 2 bad samples (2 too long): {path} row 0: the sample has 3 tokens, but --max-tokens is 2"
        in planned.stderr
    )


def test_damaged_page_of_parquet_is_named(tmp_path):
    rows = [{"tokens": list(range(1000)), "source": "rows.jsonl:1"}] * 4
    with rows_file(tmp_path / "rows.parquet") as writer:
        writer.add(rows)
    content = bytearray((tmp_path / "rows.parquet").read_bytes())
    content[len(content) // 4] ^= 1  # in the values, of which one would be another token
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(SampleError, match=r"rows.parquet.*(CRC|checksum)"):
        read_samples(str(tmp_path / "rows.parquet"))
