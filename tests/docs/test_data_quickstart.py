"""The rollouts that ship with the project: reproducible, small, and worth folding."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mcore_prefix_tree.data import LineOptions, iter_sample_groups, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS = ROOT / "recipes" / "data" / "quickstart_rollouts.jsonl"


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in ROLLOUTS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def groups():
    return list(
        iter_sample_groups(ROLLOUTS, LineOptions(tokenizer=load_tokenizer(), expand_turns=True, vocab_size=32768))
    )


def fold_ratio(samples):
    """Logical over physical tokens, counting every distinct prefix once."""
    prefixes, logical = set(), 0
    for sample in samples:
        rolling = 0
        for token in sample.tokens.tolist():
            rolling = hash((rolling, token))
            prefixes.add(rolling)
        logical += len(sample)
    return logical / len(prefixes)


def test_every_task_has_good_and_bad_rollouts_and_no_two_are_equal(rows):
    assert Counter(row["task_id"] for row in rows) == dict.fromkeys(range(8), 6)
    for task_id in range(8):
        assert {row["reward"] for row in rows if row["task_id"] == task_id} == {0.0, 1.0}
    assert len({json.dumps(row["messages"]) for row in rows}) == len(rows) == 48
    assert len({row["messages"][0]["content"] for row in rows}) == 1  # one policy prompt for all


def test_the_turns_of_a_task_fold_well(groups):
    for task in range(8):
        turns = [sample for group in groups[6 * task : 6 * task + 6] for sample in group]
        assert 28 <= len(turns) <= 48
        assert fold_ratio(turns) >= 8
    assert fold_ratio([sample for group in groups for sample in group]) >= 12
