"""Records that are marked as excluded: the others are read as in a file without them."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
from data_sources import CharacterTokenizer, streamed, told_groups
from harness.commands import run_command, write_rows
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import FieldNames, LineOptions, Skipped, StreamedGroups, iter_sample_groups, read_samples
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.data.write import make_row
from mcore_prefix_tree.objectives import make_objective

WAY_OUT = (
    "it must be true or false, or with 'completions' and 'responses' a list of one for each; "
    "data.fields={exclude: null} leaves it unread"
)
BASELINES = ["grpo", "rloo", "dr_grpo", "dapo", "gspo", "cispo"]


def member(group, number, reward, **more):
    old = [0, 0, *[-1.0 - number] * (number + 1)]
    tokens = [group, 5, *range(10, 11 + number)]
    mask = [0, 0, *[1] * (number + 1)]
    return {"tokens": tokens, "loss_mask": mask, "old_logprobs": old, "group": group, "reward": reward} | more


def content(samples):
    return [(one.tokens.tolist(), one.loss_mask.tolist(), repr(one.signals)) for one in samples]


@given(st.data())
def test_file_is_as_without_the_excluded(tmp_path_factory, data):
    """In memory and streamed, for any content of excluded records: their rollouts may have crashed."""
    folder = tmp_path_factory.mktemp("files")
    broken = st.sampled_from([{"tokens": []}, {"reward": "crashed"}, {"messages": "?"}, {"tokens": [1, -1]}, {}])
    marks = data.draw(st.lists(st.sampled_from([True, 1, 1.0, False, 0, None, "missing"]), min_size=1, max_size=12))
    rows, kept = [], []
    for number, mark in enumerate(marks):
        row = member(number // 3, number, 0.0)  # streaming reads the lines of a group together
        if mark == "missing" or not mark:
            kept.append(row)
            rows.append(row if mark == "missing" else row | {"exclude": mark})
        else:
            rows.append(row | data.draw(broken) | {"exclude": mark})
    path, without = write_rows(folder / "a.jsonl", rows), write_rows(folder / "b.jsonl", kept)
    if not kept:
        says = f"{path}: no samples; excluded {len(rows)} by the field 'exclude'"
        for read in (read_samples, partial(StreamedGroups, options=LineOptions())):
            with pytest.raises(SampleError, match=f"^{re.escape(says)}$"):
                read(path)
        return
    skipped, of_stream = Skipped(), Skipped()
    assert content(read_samples(path, skipped=skipped)) == content(read_samples(without))
    groups = StreamedGroups(path, LineOptions(), skipped=of_stream)
    assert content([one for group in groups for one in group]) == content(read_samples(without))
    assert skipped == of_stream == Skipped(excluded=len(rows) - len(kept))
    held = whole_groups(list(iter_sample_groups(path)), "group", step=None, setting="t")
    assert told_groups(streamed([path], size=2)) == told_groups(held)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_and_divisors_are_those_of_the_other_members(tmp_path, name):
    rows = [member(1, 0, 1.0), member(1, 1, 0.0), member(1, 2, 100.0), member(1, 3, 0.25), member(2, 0, 1.0)]
    rows += [member(2, 1, 0.5), member(2, 2, -100.0), member(3, 0, 7.0), member(3, 1, 9.0)]
    marked = [row | {"exclude": True} if abs(row["reward"]) > 5 else row for row in rows]
    found, expected = (
        make_objective(name).targets(read_samples(write_rows(tmp_path / "a.jsonl", content)))
        for content in (marked, [row for row in rows if abs(row["reward"]) <= 5])
    )
    assert found.divisor == expected.divisor
    assert np.array_equal(found.weight, expected.weight)
    assert np.array_equal(found.columns["advantage"], expected.columns["advantage"])
    everyone = make_objective(name).targets(read_samples(write_rows(tmp_path / "a.jsonl", rows)))
    assert not np.array_equal(everyone.columns["advantage"][:3], expected.columns["advantage"][:3])


@pytest.mark.parametrize("name", BASELINES)
def test_unscored_member_still_counts_in_the_baseline(tmp_path, name):
    """Unlike an excluded one: overlong filtering trains on nothing of it, but compares the others with it."""
    rows = [member(1, 0, 1.0), member(1, 1, 0.0), member(1, 2, -4.0)]
    whole = make_objective(name).targets(read_samples(write_rows(tmp_path / "a.jsonl", rows)))
    rows[2]["loss_mask"] = [0] * 5
    found = make_objective(name).targets(read_samples(write_rows(tmp_path / "a.jsonl", rows)))
    scored = whole.scored.sample < 2
    assert np.array_equal(found.columns["advantage"], whole.columns["advantage"][scored])
    assert found.divisor == whole.count[:2].sum()


CHAT = [{"role": "user", "content": "q"}]


def test_completions_of_a_list(tmp_path):
    row = {"prompt": CHAT, "responses": ["a", "b", "c"], "rewards": [1, None, 0]}
    options = LineOptions(tokenizer=CharacterTokenizer())
    (full,) = iter_sample_groups(write_rows(tmp_path / "a.jsonl", [row | {"rewards": [1, 5, 0]}]), options)
    skipped = Skipped()
    path = write_rows(tmp_path / "b.jsonl", [row | {"exclude": [False, 1, 0]}])
    (group,) = iter_sample_groups(path, options, skipped=skipped)
    assert content(group) == [(t, m, s.replace("a.jsonl", "b.jsonl")) for t, m, s in content([full[0], full[2]])]
    assert [one.source for one in group] == [f"{path}:1 completion {place}" for place in (0, 2)]
    assert skipped.excluded == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"tokens": [1], "exclude": "yes"}, "is \"yes\""),
        ({"tokens": [1], "exclude": 2}, "is 2"),
        ({"tokens": [1], "exclude": [True]}, "is [true]"),
        ({"prompt": CHAT, "responses": ["a", "b"], "exclude": [True]}, "is [true]"),
        ({"prompt": CHAT, "responses": ["a", "b"], "exclude": [True, "b"]}, "is \"b\""),
    ],
)  # fmt: skip
def test_other_values_are_named(tmp_path, row, says):
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(SampleError, match=re.escape(f"{path}:1: field 'exclude' {says}; {WAY_OUT}")):
        read_samples(path, tokenizer=CharacterTokenizer())
    unread = FieldNames(given={"exclude": None})
    assert read_samples(path, tokenizer=CharacterTokenizer(), names=unread)


def test_other_name_and_tables(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"tokens": [[1, 2], [1, 3], [1, 4]], "remove_sample": [0.0, None, 1.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    skipped = Skipped()
    names = FieldNames(given={"exclude": "remove_sample"})
    read = read_samples(tmp_path / "a.parquet", names=names, skipped=skipped)
    assert [one.tokens.tolist() for one in read] == [[1, 2], [1, 3]]
    assert str(skipped) == "excluded 1 by the field 'exclude'"


def test_writer_keeps_excluded_records_and_reports_them(tmp_path):
    """As ``score`` reads and writes them."""
    names = FieldNames(given={"exclude": "bad"}, keeps_others=True)
    rows = [{"tokens": [1, 2], "bad": 1}, {"tokens": [1, 3], "bad": 0, "other": 5}]
    (one, other) = read_samples(write_rows(tmp_path / "a.jsonl", rows), names=names)
    assert make_row(one, names)["bad"] is True
    assert "bad" not in make_row(other, names)


@pytest.mark.parametrize(
    ("rows", "by", "step", "says"),
    [
        (
            [{"tokens": [1], "pair": "p", "chosen": True}, {"tokens": [1], "pair": "p", "chosen": False, "exclude": 1}],
            "pair",
            None,
            "a.jsonl:1: pair 'p' has 1 sample; a pair is two samples, one of them chosen",
        ),
        (
            [member(1, 0, 1), member(1, 1, 1), member(2, 0, 1), member(2, 1, 1, exclude=True)],
            "group",
            2,
            "a.jsonl:3: group 2 has 1 sample and group 1 has 2 samples; a step of batch.global_batch_size=2 takes "
            "groups of one size; to take any sizes, set batch.groups_per_step and batch.global_batch_size=null",
        ),
    ],
)
def test_incomplete_groups_name_their_excluded_records(tmp_path, rows, by, step, says):
    path = write_rows(tmp_path / "a.jsonl", rows)
    lines = list(iter_sample_groups(path))
    with pytest.raises(SampleError, match=re.escape(says)):
        whole_groups(lines, by, step=step, setting="t")
    with pytest.raises(SampleError, match=re.escape(says)):
        streamed([path], by, step=step)


def test_inspect_counts_the_excluded(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"tokens": [1, 2]}, {"tokens": [], "exclude": True}])
    result = run_command("inspect", path, "--json")
    assert (json.loads(result.stdout)["excluded"], json.loads(result.stdout)["samples"]) == (1, 1)
    assert result.stderr == "excluded 1 by the field 'exclude'\n"
