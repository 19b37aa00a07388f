"""Ranks that read different data get an error with rank, machine and file before the first step."""

from __future__ import annotations

import os
import time
from threading import Barrier, Thread, local

import numpy as np
import pytest
from harness.commands import write_rows

from mcore_prefix_tree import Sample
from mcore_prefix_tree.data import LineOptions, StreamedGroups, check_same_samples, iter_sample_groups
from mcore_prefix_tree.data.source import once_per_node
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.signals import Signals
from mcore_prefix_tree.utils.ranks import Ranks, name_ranks

HOSTS = ("node-a", "node-a", "node-b", "node-b")
ROWS = [{"tokens": [1, 2, number], "loss_mask": [0, 1, 1]} for number in range(10, 19)]
WAY_OUT = "; give all machines the same files, and the same tokenizer in the same version"


@pytest.fixture
def of_ranks(monkeypatch):
    """``of_ranks(check)`` calls ``check(ranks)`` on four ranks of two machines; returns each rank's error, or None."""
    here = local()
    monkeypatch.setattr("socket.gethostname", lambda: HOSTS[here.rank])

    def run(check):
        values, said, barrier = [None] * len(HOSTS), [None] * len(HOSTS), Barrier(len(HOSTS), timeout=60)

        def of_rank(rank):
            here.rank = rank

            def gather(value):
                values[rank] = value
                barrier.wait()
                found = list(values)
                barrier.wait()
                return found

            try:
                check(Ranks(rank=rank, size=len(HOSTS), gather=gather))
            except SampleError as error:
                said[rank] = str(error)

        threads = [Thread(target=of_rank, args=(rank,)) for rank in range(len(HOSTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    return run


@pytest.fixture
def copies(tmp_path):
    """``copies(rows)``: the path of each rank's file, ``ROWS`` on node-a and the given rows on node-b."""

    def write(theirs):
        for host, rows in (("node-a", ROWS), ("node-b", theirs)):
            (tmp_path / host).mkdir()
            write_rows(tmp_path / host / "d.jsonl", rows)
        return [str(tmp_path / host / "d.jsonl") for host in HOSTS]

    return write


def held(paths):
    def check(ranks):
        path = paths[ranks.rank]
        check_same_samples(list(iter_sample_groups(path)), [path], ranks)

    return check


def streamed(paths):
    return lambda ranks: StreamedGroups(paths[ranks.rank], LineOptions(), ranks=ranks)


def changed(**fields):
    return [*ROWS[:-1], ROWS[-1] | fields]


@pytest.mark.parametrize("read", [held, streamed])
def test_equal_copies_in_other_folders_are_the_same_data(of_ranks, copies, read):
    assert of_ranks(read(copies(ROWS))) == [None] * 4


def test_error_names_the_odd_machine_and_its_counts(of_ranks, copies):
    paths = copies(ROWS[:-2])
    (sentence,) = set(of_ranks(held(paths)))
    named = ", ".join(f"{path} ({os.path.getsize(path)} bytes)" for path in (paths[0], paths[2]))
    assert sentence == (
        "ranks 2-3 on node-b read other data (records: 7, samples: 7, tokens: 21) than rank 0 on node-a (records: 9, "
        f"samples: 9, tokens: 27), from {named}{WAY_OUT}"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": [1, 2, 19]},
        {"loss_mask": [0, 1, 0.5]},
        {"reward": 1.0},
        {"merge_key": "adapter"},
        {"label": False},
        {"old_logprobs": [None, -1.0, -2.0]},
        {"group": "a"},
        {"teacher": {"token_ids": [[1, 2]] * 3, "logprobs": [[-1.0, -2.0]] * 3}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_any_difference_is_detected(of_ranks, copies, other):
    (sentence,) = set(of_ranks(held(copies(changed(**other)))))
    assert sentence.startswith(
        "ranks 2-3 on node-b read other data (records: 9, samples: 9, tokens: 27) than rank 0 on node-a (records: 9, s"
    )


def test_equal_tokens_in_other_samples_or_records_are_detected(of_ranks):
    def alike(*lengths):
        return [Sample(tokens=[5] * length, loss_mask=[0] * length) for length in lengths]

    for theirs in ([alike(3), alike(2)], [alike(2, 3)], [alike(2, 3), []]):
        said = of_ranks(
            lambda ranks, own=theirs: check_same_samples(own if ranks.rank else [alike(2), alike(3)], [], ranks)
        )
        assert None not in said


def test_default_id_from_the_file_is_no_difference(of_ranks, copies):
    """Values that the turns of a conversation get as the id of their rollout."""
    paths = copies(ROWS)

    def check(ranks):
        place = f"{paths[ranks.rank]}:1"
        sample = Sample(tokens=[1, 2], source=f"{place} turn 0", signals=Signals(reward=1.0, rollout=place, turn=0))
        check_same_samples([[sample]], paths[:1], ranks)

    assert of_ranks(check) == [None] * 4


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(ROWS[:-1], id="fewer records"),
        pytest.param(changed(tokens=[1, 2, 19]), id="another record"),
        pytest.param([*ROWS[:-1], {}], id="a bad record"),
        pytest.param(changed(comment="two"), id="another size"),
    ],
)
def test_streamed_files_are_compared_before_they_are_gone_through(of_ranks, copies, monkeypatch, theirs):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr("mcore_prefix_tree.data.stream.StreamedGroups._go_through", never)
    (sentence,) = set(of_ranks(streamed(copies(theirs))))
    assert sentence.startswith("ranks 2-3 on node-b ")
    assert "records: 9" in sentence
    assert sentence.endswith(WAY_OUT)


def test_files_of_different_size_are_named(of_ranks, tmp_path, monkeypatch):
    """Here each machine has a separate folder, and the recipe names files in it."""
    sizes = {"a.jsonl": (10, 10), "b.jsonl": (20, 22), "c.jsonl": (30, 30)}
    hosts = local()

    def check(ranks):
        hosts.other = ranks.rank >= 2
        groups = [[Sample(tokens=[1 + hosts.other])]]
        check_same_samples(groups, [*sizes], ranks)

    monkeypatch.setattr("os.path.getsize", lambda path: sizes[path][hosts.other])
    (sentence,) = set(of_ranks(check))
    assert sentence.endswith(f", from b.jsonl (20 bytes), b.jsonl (22 bytes){WAY_OUT}")
    sizes["b.jsonl"] = (20, 20)
    (sentence,) = set(of_ranks(check))
    assert sentence.endswith(f", from a.jsonl (10 bytes), b.jsonl (20 bytes), c.jsonl (30 bytes){WAY_OUT}")


def test_ranks_are_named_in_few_words():
    hosts = [f"node-{rank // 4}" for rank in range(24)]
    assert name_ranks([0], hosts) == "rank 0 on node-0"
    assert name_ranks([0, 1, 3, 4], hosts) == "ranks 0-1, 3 on node-0 and rank 4 on node-1"
    assert name_ranks(range(1, 24), hosts) == (
        "ranks 1-3 on node-0 and ranks 4-7 on node-1 and ranks 8-11 on node-2 and those of 3 other machines"
    )


def test_comparison_is_fast():
    rng = np.random.default_rng(0)
    groups = [[Sample(tokens=rng.integers(0, 1 << 17, size=3_400))] for _ in range(2_400)]  # 8 M tokens
    started = time.process_time()
    check_same_samples(groups, ["d.jsonl"], Ranks(size=2, gather=lambda digest: [digest, digest]))
    assert time.process_time() - started < 5  # 0.3 here; walking over tokens in Python would take 10


@pytest.mark.parametrize("fails", [False, True])
def test_each_machine_reads_once_and_its_ranks_map_the_arrays(of_ranks, fails):
    calls, results = [], [None] * len(HOSTS)

    def read():
        calls.append(1)
        if fails:
            raise SampleError("data.jsonl:1: is bad")
        return [Sample(**row) for row in ROWS]

    def check(ranks):
        results[ranks.rank] = once_per_node(read, ranks, ["data.jsonl"])

    assert of_ranks(check) == ["data.jsonl:1: is bad" if fails else None] * len(HOSTS)
    assert len(calls) == 2
    for samples in results if not fails else ():
        assert [sample.tokens.tolist() for sample in samples] == [row["tokens"] for row in ROWS]
    assert fails or [samples[0].tokens.base is not None for samples in results] == [False, True, False, True]


def test_ranks_that_see_other_files_read_them(of_ranks):
    read = []
    of_ranks(lambda ranks: read.append(once_per_node(lambda: ranks.rank, ranks, ranks.rank % 2)))
    assert sorted(read) == [0, 1, 2, 3]
