"""Groups of files that memory does not hold: those that the same lines make in memory, whoever counts them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from data_sources import CharacterTokenizer, streamed, told_groups, write_files
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.data import LineOptions, StreamedGroups, iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.sample import SampleError

IDS = [0, 7, True, 2.0, 2.5, "7", "é", 2**70, 1e300]


def line(group: object, number: int, **more: object) -> str:
    return json.dumps({"tokens": [number, number + 1, 1], "group": group} | more)


@pytest.mark.parametrize("size", [1, 2, 5])
@given(
    st.lists(
        st.tuples(st.sampled_from(range(len(IDS))), st.integers(0, 3)), min_size=1, max_size=8, unique_by=lambda t: t[0]
    ),
    st.lists(st.integers(0, 40), max_size=2),
)
def test_groups_are_those_of_the_lines_in_memory(tmp_path_factory, size, shape, cuts):
    """Groups of any size, with blank lines, across the borders of files and of ranks."""
    lines = [line(IDS[key], number) for key, count in shape for number in range(count + 1)]
    lines = [text for number, line in enumerate(lines) for text in ([line, " "] if number % 3 == 0 else [line])]
    places = sorted({0, len(lines), *(cut for cut in cuts if cut < len(lines))})
    parts = [lines[start:end] for start, end in pairwise(places)]
    paths = write_files(tmp_path_factory.mktemp("files"), *parts)
    expected = whole_groups(list(iter_sample_groups(paths)), "group", step=None, setting="the test")
    groups = streamed(paths, size=size)
    assert told_groups(groups) == told_groups(expected)
    assert groups.sizes.tolist() == [len(group) for group in expected]


@pytest.mark.parametrize("size", [1, 2, 5])
@given(
    st.lists(
        st.tuples(st.sampled_from(IDS[:4]), st.sampled_from([None, *IDS[:5]]), st.integers(1, 3)),
        min_size=1, max_size=8, unique_by=lambda one: one[:2],
    )
)  # fmt: skip
def test_rollouts_are_those_of_the_lines_in_memory(tmp_path_factory, size, shape):
    """A rollout is known by its group too; lines without an id are rollouts by themselves."""
    lines = [line(group, number, rollout=rollout) for group, rollout, count in shape for number in range(count)]
    paths = write_files(tmp_path_factory.mktemp("files"), lines)
    expected = whole_groups(list(iter_sample_groups(paths)), "rollout", step=None, setting="the test")
    groups = streamed(paths, "rollout", size=size)
    assert told_groups(groups) == told_groups(expected)
    assert groups.sizes.tolist() == [len(group) for group in expected]


@pytest.mark.parametrize("kind", ["file", "shuffled"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streamed_groups_keep_the_order_of_memory_from_any_step(tmp_path, kind, num_workers):
    lines = [line(group, number) for group in range(7) for number in range(group % 4 + 1)]
    paths = write_files(tmp_path, lines[:9], lines[9:])
    held = whole_groups(list(iter_sample_groups(paths)), "group", step=None, setting="the test")
    order, other = (
        SampleOrder(groups, seed=3, order=kind, by_line=True, step=2, whole_steps=True)
        for groups in (held, streamed(paths, size=2))
    )
    assert (other.per_epoch, other.left_out, other.is_streamed) == (6, 1, True)
    steps = [told_groups([order.take(2 * step, 2)]) for step in range(8)]
    for first in (0, 1, 4):  # within an epoch, and in the next one
        assert other.samples_before(2 * first) == order.samples_before(2 * first)
        with other.stream(2 * first, num_workers=num_workers) as stream:
            assert [told_groups([stream.take(2)]) for _ in steps[first:]] == steps[first:]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("ids", "second", "first"),
    [(["a", "b", "b", "a", "a"], 4, 1), ([1, 2, True, 2.0], 3, 1), (["a", "b", "c", "b", "a"], 4, 2)],
)
def test_groups_apart_are_rejected_with_both_lines(tmp_path, size, ids, second, first):
    lines = [line(group, number) for number, group in enumerate(ids)]
    (path,) = write_files(tmp_path, lines)
    says = (
        f"{path}:{second}: group {ids[second - 1]!r} is at {path}:{first} too, with other lines between; streaming "
        "reads a group from one place: give each its own id, put its lines next to each other, or hold all samples in "
        "memory (data.streaming=false)"
    )
    with pytest.raises(SampleError) as raised:
        streamed([path], size=size)
    assert str(raised.value) == says


def test_one_record_of_several_rollouts_is_not_streamed(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "q"}], "responses": ["a", "b"], "rewards": [0, 1]}'
    )
    options = LineOptions(tokenizer=CharacterTokenizer())
    held = whole_groups(list(iter_sample_groups(tmp_path / "a.jsonl", options)), "rollout", step=None, setting="t")
    assert [len(one) for one in held] == [1, 1]
    with pytest.raises(SampleError, match="its record holds several rollouts, which streaming reads together"):
        StreamedGroups(tmp_path / "a.jsonl", options, grouped_by="rollout")


UNEQUAL = [line("a", 1), line("a", 2), line("b", 3)]
PAIRS = [line(0, n, pair=pair, chosen=n % 2 == 0) for n, pair in enumerate(["p", "p", "q"])]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("lines", "by", "step"),
    [
        ([line("a", 1), '{"tokens": [1]}', "[]"], "group", None),
        (UNEQUAL, "group", 2),
        (UNEQUAL[:2], "group", 3),
        (PAIRS, "pair", None),
        (PAIRS[:2], "pair", 3),
        (UNEQUAL, "pair", 2),
        ([line("a", 1), line("a", 2, rollout=7), line("a", 3, rollout=7)], "rollout", 4),
    ],
)
def test_streamed_errors_equal_errors_in_memory(tmp_path, lines, by, step, size):
    paths = write_files(tmp_path, lines)
    with pytest.raises(SampleError) as expected:
        whole_groups(iter_sample_groups(paths), by, step=step, setting="the test")
    with pytest.raises(SampleError) as raised:
        streamed(paths, by, step=step, size=size)
    assert str(raised.value) == str(expected.value)


def test_skipped_records_leave_the_rest_of_their_group(tmp_path):
    paths = write_files(tmp_path, [line("a", 1), line("a", -2), "{", line("a", 3), line("b", 4)])
    groups = streamed(paths, on_error="skip", size=3)
    assert [len(group) for group in groups] == [2, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("bad", range(6))
def test_check_receives_complete_groups(tmp_path, size, bad):
    """Also those at the borders of ranks."""
    lines = [line(group, 10 * group + number) for group in range(6) for number in range(4)]
    paths = write_files(tmp_path, lines)
    shown = []

    def check(samples):
        shown.append(samples[0].signals.group)
        assert [sample.signals.group for sample in samples] == [shown[-1]] * 4
        if shown[-1] == bad:
            raise SampleError(f"{samples[0].source}: is bad")

    with pytest.raises(SampleError, match=f"^{paths[0]}:{4 * bad + 1}: is bad$"):
        streamed(paths, size=size, check=check)
    shown.clear()
    bad = None
    streamed(paths, size=size, check=check)
    assert sorted(shown) == [*range(6)], "once each"


def test_lines_by_themselves_are_checked_too(tmp_path):
    def check(samples):
        assert len(samples) == 1
        if samples[0].tokens[0] == 3:
            raise SampleError("three")

    paths = write_files(tmp_path, UNEQUAL)
    with pytest.raises(SampleError, match="three"):
        StreamedGroups(paths, LineOptions(), check=check)
    assert len(StreamedGroups(paths, LineOptions())) == 3
