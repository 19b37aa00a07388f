"""Records read as they are needed: the samples and the order of memory, from any point, in little memory."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from data_sources import CharacterTokenizer, by_ranks, write_table
from harness.commands import write_rows
from harness.marks import quick
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.data import LineOptions, Skipped, StreamedGroups, iter_sample_groups, read_samples
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.files import FileIndex
from mcore_prefix_tree.data.jsonl import Line, LineIndex
from mcore_prefix_tree.sample import SampleError

FORMS = ["jsonl", "parquet", "arrow", "arrow-lz4", "feather", "stream"]
OPTIONS = LineOptions(tokenizer=CharacterTokenizer(), expand_turns=True, vocab_size=128, limits={"the limit": 30})


def chat(turns: int, text: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for _ in range(turns) for role in ("user", "assistant")]}


def tokens(*ids: int) -> dict[str, object]:
    return {"tokens": list(ids)}


GOOD = [tokens(1, 2, 3), chat(3, "ab"), "", tokens(4), chat(1, "xyz"), "   ", chat(4, "q"), tokens(5, 6)]
# A record that cannot be read, one of another vocabulary, and a conversation whose last two turns are too long.
BAD = [*GOOD[:2], "{", tokens(128), chat(4, "abcd"), *GOOD[2:], {"messages": []}]


@pytest.fixture
def write(tmp_path):
    """``write(form, *files)`` writes rows; text is a line by itself, blank in no table and a row of nulls otherwise."""

    def write(form, *files, ending="\n"):
        paths = []
        for number, rows in enumerate(files):
            if form == "jsonl":
                paths.append(tmp_path / f"{number}.jsonl")
                lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
                paths[-1].write_text("\n".join(lines) + ending)
                continue
            kept = [
                {} if isinstance(row, str) else row for row in rows if not (isinstance(row, str) and not row.strip())
            ]
            table = [{"tokens": row.get("tokens"), "messages": row.get("messages")} for row in kept]
            paths.append(Path(write_table(tmp_path, table, form, name=str(number))))
        return paths

    return write


def told(samples):
    return [(sample.source, sample.tokens.tolist(), sample.loss_mask.tolist(), sample.merge_key) for sample in samples]


def in_memory(paths, skipped=None):
    on_error = "raise" if skipped is None else "skip"
    return list(iter_sample_groups(paths, OPTIONS, on_error=on_error, skipped=skipped))


@given(st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\r", b"\n")), min_size=1, max_size=4))
def test_an_index_finds_every_line(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("files")
    paths = [str(folder / str(number)) for number in range(len(contents))]
    expected = []
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(content)
        with open(path, "rb") as stream:
            expected += [Line(f"{path}:{n}", line, is_first=n == 1) for n, line in enumerate(stream, start=1)]
    index = FileIndex(paths)
    assert [index.read(line) for line in range(len(index))] == expected
    parts = [index.part(rank, size) for size in (1, 3, 40) for rank in range(size)]
    assert [record for records, _ in parts for record in records] == 3 * [*range(len(index))]
    assert sum(size for _, size in parts) == 3 * sum(map(len, contents))


@pytest.mark.parametrize("ending", ["", "\n", "\n\n"])
def test_the_samples_are_those_of_the_reader(write, ending):
    paths = write("jsonl", GOOD, [], GOOD[::-1], ending=ending)
    streamed = StreamedGroups(paths, OPTIONS)
    assert [told(group) for group in streamed if group] == [told(group) for group in in_memory(paths)]
    assert streamed.sizes.tolist() == [len(group) for group in streamed]
    again = pickle.loads(pickle.dumps(streamed))
    assert [told(group) for group in again] == [told(group) for group in streamed]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_names_the_first_bad_line(write, size):
    paths = write("jsonl", GOOD, BAD)
    with pytest.raises(SampleError) as alone:
        in_memory(paths)
    assert f"{paths[1]}:3: not valid JSON" in str(alone.value)
    outcomes = by_ranks(size, lambda ranks: StreamedGroups(paths, OPTIONS, ranks=ranks))
    assert outcomes == [str(alone.value)] * size


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("form", FORMS)
def test_skipping_loses_nothing_else_whoever_counts(write, form, size):
    expected, counted = Skipped(), []
    good = told(chain.from_iterable(in_memory(write(form, GOOD, GOOD))))
    paths = write(form, BAD, GOOD)
    kept = in_memory(paths, expected)
    bad = {"outside the vocabulary": 1, "too long": 2}
    assert expected.kinds == bad | ({"unreadable": 1, "malformed": 1} if form == "jsonl" else {"malformed": 2})
    numbers = ("3", "4", "5 turn 2", "5 turn 3", "12") if form == "jsonl" else ("2", "3", "4 turn 2", "4 turn 3", "9")
    join = ":" if form == "jsonl" else " row "
    assert [reason.partition(": ")[0] for reason in expected.first] == [f"{paths[0]}{join}{at}" for at in numbers]
    assert sum(map(len, kept)) == len(good) + 2, "two turns of the long conversation are short enough"

    def make(ranks):
        counted.append(Skipped())
        return StreamedGroups(paths, OPTIONS, on_error="skip", skipped=counted[-1], ranks=ranks)

    for streamed in by_ranks(size, make):
        assert [told(group) for group in streamed if group] == list(map(told, kept))
    assert counted == [expected] * size


def test_skipped_samples_are_reported(write):
    (path,) = write("jsonl", ["{", tokens(1), *["[]"] * 30])
    with pytest.warns(
        UserWarning, match=r"skipped 31 bad samples \(31 unreadable\): .*:1: not valid JSON.* \| and 21 more"
    ):
        assert len(read_samples(path, on_error="skip")) == 1
    with pytest.raises(ValueError, match="on_error='ignore' must be one of 'raise', 'skip'"):
        read_samples(path, on_error="ignore")
    (path,) = write("jsonl", ["{", "[]"])
    for make in (lambda: read_samples(path, on_error="skip"), lambda: StreamedGroups(path, OPTIONS, on_error="skip")):
        with pytest.raises(SampleError, match=r"no samples; skipped 2 bad samples \(2 unreadable\): "):
            make()
    with pytest.raises(SampleError, match="no samples; there are no records"):
        StreamedGroups(write("jsonl", ["", " "]), OPTIONS)


@pytest.mark.parametrize("path", ["-", "rows.jsonl.gz"])
def test_files_without_random_access_are_rejected(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl.gz").touch()
    with pytest.raises(SampleError, match=r"cannot be read from the middle.*data\.streaming=false"):
        StreamedGroups(path, OPTIONS)


@pytest.mark.parametrize("kind", quick("shuffled", of=["file", "shuffled"]))
@pytest.mark.parametrize(
    ("form", "num_workers"), [("jsonl", 0), ("jsonl", 2), ("parquet", 2), *((form, 0) for form in FORMS[1:])]
)
def test_the_order_is_that_of_samples_in_memory(write, kind, form, num_workers):
    paths = [*write(form, BAD, GOOD), *write("jsonl", BAD)]
    order = SampleOrder(in_memory(paths, Skipped()), seed=3, order=kind)
    streamed = SampleOrder(StreamedGroups(paths, OPTIONS, on_error="skip"), seed=3, order=kind)
    epoch = order.samples_per_epoch
    assert streamed.samples_per_epoch == epoch
    expected = told(order.take(0, 3 * epoch + 5))
    assert told(streamed.take(0, 3 * epoch + 5)) == expected
    # It continues from any stop: within a line, at an epoch's end, in a later one.
    for consumed in (1, epoch - 1, epoch, epoch + 3):
        with streamed.stream(consumed, num_workers=num_workers) as stream, order.stream(consumed) as held:
            at = consumed
            for count in (1, 4, 0, epoch, 2):
                assert told(stream.take(count)) == told(held.take(count)) == expected[at : at + count]
                at += count
                assert stream.consumed == held.consumed == at
    count = len(order.groups)
    lines = [line for line, _ in islice(streamed.pieces(0), 3 * count)]
    assert len({tuple(sorted(lines[at : at + count])) for at in (0, count, 2 * count)}) == 1


@pytest.mark.parametrize(("form", "num_workers"), [("jsonl", 0), ("jsonl", 1), *((form, 0) for form in FORMS[1:])])
def test_changed_file_is_detected(write, form, num_workers):
    other, path = write(form, [tokens(8)], [tokens(number) for number in range(9)])
    order = SampleOrder(StreamedGroups([other, path], OPTIONS), seed=0, order="file")
    without_chunks = pickle.loads(pickle.dumps(order))
    first = path.stat()
    for rows in ([tokens(9)], [tokens(number) for number in range(1, 10)]):
        path.unlink()  # as a writer does; mapped pages stay
        write(form, [tokens(8)], rows)
        os.utime(other, ns=(0, first.st_mtime_ns))
        os.utime(path, ns=(0, first.st_mtime_ns + 1))  # the clock of a file system may tick too slowly for this test
        for one in (order, without_chunks):
            says = pytest.raises(SampleError, match=rf"^{path}: has changed since the run began; do not change")
            with one.stream(1, num_workers=num_workers) as stream, says:
                stream.take(1)
    path.unlink()
    with pytest.raises(SampleError, match=rf"^{path}: cannot be read: .*No such file"):
        order.take(1, 1)


def test_a_file_that_changes_while_a_line_is_read_is_detected(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "data.jsonl", [tokens(1), tokens(2)])
    groups, read = StreamedGroups([path], OPTIONS), LineIndex.read

    def read_and_change(index, number):
        found = read(index, number)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        return found

    monkeypatch.setattr(LineIndex, "read", read_and_change)
    with pytest.raises(SampleError, match="has changed since the run began"):
        groups[1]


def test_changed_samples_of_a_line_are_detected(write):
    """A change that keeps a file's size and time: here by hand, in a job by a chat format that looks at the clock."""
    (path,) = write("jsonl", [tokens(number) for number in range(9)])
    order = SampleOrder(StreamedGroups(path, OPTIONS), seed=0, order="file")
    first = path.stat()
    path.write_text("\n" * first.st_size)
    os.utime(path, ns=(0, first.st_mtime_ns))
    with pytest.raises(SampleError, match=rf"^{path}:1: gives 0 samples, but it gave 1 when the run began"):
        order.take(0, 1)


def test_progress_is_reported(write, monkeypatch):
    monkeypatch.setattr("mcore_prefix_tree.data.stream._PROGRESS_BYTES", 20)
    heard = []
    (path,) = write("jsonl", [tokens(number) for number in range(50)])
    StreamedGroups(path, OPTIONS, progress=lambda done, total: heard.append((done, total)))
    assert len(heard) > 10
    assert {total for _, total in heard} == {path.stat().st_size}
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)


# Takes note of SIGTERM as Megatron does, trains on, and saves when told: at an exit that closes no stream.
JOB = """
import signal, sys
import psutil
from mcore_prefix_tree.data import LineOptions, StreamedGroups
from mcore_prefix_tree.data.batches import SampleOrder
path, workers = sys.argv[1], int(sys.argv[2])
noted = []
signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
order = SampleOrder(StreamedGroups(path, LineOptions()), seed=0, order="file")
stream = order.stream(0, num_workers=workers)
taken = stream.take(4)
print(*(worker.pid for worker in psutil.Process().children()), flush=True)
assert sys.stdin.readline() == "go on\\n"
taken += stream.take(60)
print("saved", len(noted), sum(int(sample.tokens.sum()) for sample in taken))
"""


@contextmanager
def job(path, num_workers):
    """The job, leading a separate process group, once it has begun to read; and its workers."""
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(path), str(num_workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
            assert len(workers) == num_workers
            yield process, workers
        finally:
            process.kill()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_terminated_job_saves_first(write, num_workers):
    """torchrun and Slurm signal all of its processes; the prefetch process must not end before it."""
    (path,) = write("jsonl", [tokens(number) for number in range(100)])
    with job(path, num_workers) as (process, workers):
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate("go on\n", timeout=60)
        assert out.split() == ["saved", "1", str(sum(range(64)))]
        assert process.returncode == 0
        assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_nothing_outlives_a_job_that_is_killed(write):
    (path,) = write("jsonl", [{"tokens": [number] * 50_000} for number in range(70)])  # more than a pipe holds
    with job(path, 2) as (process, workers):
        process.kill()
        assert psutil.wait_procs(workers, timeout=30)[1] == []


PEAK = """
import sys
import psutil, pyarrow.parquet, torch.utils.data  # before the measurement begins
from mcore_prefix_tree.data import LineOptions, StreamedGroups, iter_sample_groups, tables
from mcore_prefix_tree.data.batches import SampleOrder
path = sys.argv[1]
tables.CACHE_BYTES = 1 << 22

def held():
    info = psutil.Process().memory_info()
    return info.rss - info.shared  # pages of a mapped file can be given back at any time

next(iter_sample_groups(path))  # the first row loads what converts it: tens of megabytes, whatever the file's size
# The largest comes last: a way reuses memory that an earlier one has returned to its allocator.
for way, workers in (("streamed", 1), ("streamed", 0), ("held", 0)):
    before = peak = held()
    groups = StreamedGroups(path, LineOptions()) if way == "streamed" else list(iter_sample_groups(path))
    order = SampleOrder(groups, seed=0, order="shuffled")
    total = 0
    with order.stream(0, num_workers=workers) as stream:
        for _ in range(0, order.samples_per_epoch, 8):
            total += sum(int(sample.tokens.sum()) for sample in stream.take(8))
            peak = max(peak, held())
    print(peak - before, total)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="psutil knows of mapped pages on Linux")
@pytest.mark.parametrize(
    ("form", "limit"),
    [
        pytest.param("jsonl", 8e6, marks=pytest.mark.ci),
        *(pytest.param(form, 20e6, marks=pytest.mark.slow) for form in ("parquet", "arrow")),
    ],
)
def test_memory_stays_small_on_a_large_file(tmp_path, form, limit):
    rows = np.random.default_rng(0).integers(0, 30_000, (1600, 4000))
    table = [{"tokens": row.tolist()} for row in rows] if form == "jsonl" else pa.table({"tokens": list(rows)})
    path = write_table(tmp_path, table, form, rows_a_chunk=16)
    assert Path(path).stat().st_size > 14e6
    done = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True)
    *streamed, (held, total) = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(streamed) == 2
    for peak, same in streamed:
        assert same == total == int(rows.sum())
        assert peak < limit < 50e6 < held
