from __future__ import annotations

import re

import pytest
from data_sources import Words
from harness.commands import write_rows

from mcore_prefix_tree import Sample, SampleError
from mcore_prefix_tree.data import LineOptions, iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.objectives import SupervisedFineTuning
from mcore_prefix_tree.signals import Signals


def line(group: object, number: int, samples: int = 1) -> list[Sample]:
    return [
        Sample(tokens=[number], source=f"f:{number} turn {turn}", signals=Signals(group=group))
        for turn in range(samples)
    ]


def lines(*groups: object) -> list[list[Sample]]:
    return [line(group, number) for number, group in enumerate(groups, start=1)]


def pair(*sides: bool, key: str = "p") -> list[list[Sample]]:
    return [
        [Sample(tokens=[1], source=f"{key}:{number}", signals=Signals(pair=key, chosen=side))]
        for number, side in enumerate(sides)
    ]


def test_neighbouring_lines_of_a_group_become_one():
    given = [line("a", 1, samples=2), line("a", 2), [], line("b", 3), line("b", 4, samples=2)]
    groups = whole_groups(given, "group", step=6, setting="grpo")
    assert groups == [given[0] + given[1], given[3] + given[4]]


def turns(*ids: tuple[object, object]) -> list[list[Sample]]:
    return [
        [Sample(tokens=[1], source=f"f:{number}", signals=Signals(group=group, rollout=rollout))]
        for number, (group, rollout) in enumerate(ids, start=1)
    ]


def test_neighbouring_turns_of_a_rollout_become_one():
    """A rollout is known by its group too; a sample without an id is a rollout by itself."""
    given = turns(("a", 1), ("a", 1), ("b", 1), (None, 1), ("b", None), ("b", None), ("b", 1.5))
    groups = whole_groups(given, "rollout", step=None, setting="sft")
    assert [[sample.source for sample in group] for group in groups] == [
        ["f:1", "f:2"], ["f:3"], ["f:4"], ["f:5"], ["f:6"], ["f:7"],
    ]  # fmt: skip


def test_lines_of_a_group_may_lie_apart():
    """Groups come in the order of their first lines, whatever their prompts are."""
    given = lines("a", "b", "a", "c", "b", "a")
    groups = whole_groups(given, "group", step=None, setting="grpo")
    assert groups == [given[0] + given[2] + given[5], given[1] + given[4], given[3]]


def test_turns_of_a_conversation_are_one_rollout(tmp_path):
    """Also if the data have no field but ``messages``: nothing else identifies the rollout of a turn."""
    write = tmp_path / "chats.jsonl"
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant") * 3]
    write_rows(write, ({"messages": chat[:count]} for count in (4, 6)))
    read = list(iter_sample_groups(write, LineOptions(tokenizer=Words(), expand_turns=True)))
    assert [len(group) for group in whole_groups(read, "rollout", step=None, setting="sft")] == [2, 3]
    targets = SupervisedFineTuning(normalise="rollout").targets([sample for line in read for sample in line])
    assert (targets.divisor, targets.weight.tolist()) == (2, [1 / 2] * 2 + [1 / 3] * 3)


def test_pairs():
    given = pair(True, False, key="p") + pair(False, True, key="q")
    assert [len(group) for group in whole_groups(given, "pair", step=2, setting="dpo")] == [2, 2]


@pytest.mark.parametrize(
    ("given", "by", "step", "says"),
    [
        (lines("a", None), "group", 2, "f:2 turn 0: field 'group' is missing, and the test needs it"),
        (
            lines(1, 1, 1, 2, 2),
            "group",
            6,
            "f:4 turn 0: group 2 has 2 samples and group 1 has 3 samples; a step of .*set batch.groups_per_step and "
            "batch.global_batch_size=null",
        ),
        (lines("a", "a", "b", "b"), "group", 3, "f:1 turn 0: group 'a' has 2 samples, and steps of .*a multiple of 2"),
        (pair(True, key="p"), "pair", 2, "p:0: pair 'p' has 1 sample; a pair is two"),
        (pair(True, False, True), "pair", 2, "p:2: pair 'p' has 3 samples; a pair is two"),
        (pair(True, False, True), "pair", None, "p:2: pair 'p' has 3 samples; a pair is two"),
        (pair(True, False), "pair", 3, "p:0: pair 'p' has 2 samples, and steps of batch.global_batch_size=3 would cut"),
        (
            turns(("a", None), ("a", 2), ("a", 2)),
            "rollout",
            4,
            "f:2: rollout 2 has 2 samples and rollout f:1 has 1 sample; .*takes rollouts of one size; .*set "
            "batch.groups_per_s",
        ),
    ],
)
def test_error_names_groups_that_a_step_would_cut(given, by, step, says):
    with pytest.raises(SampleError, match=says):
        whole_groups(given, by, step=step, setting="the test")


def test_steps_that_count_groups_take_any_group_size():
    given = [line("a", 1, samples=3), line("b", 2), line("b", 3, samples=6), line("c", 4)]
    groups = whole_groups(given, "group", step=None, setting="grpo")
    assert groups == [given[0], given[1] + given[2], given[3]]


@pytest.mark.parametrize("kind", ["shuffled", "folded", "file"])
def test_no_step_takes_a_group_twice_or_cuts_one(kind):
    groups = whole_groups(lines(*(number // 2 for number in range(14))), "group", step=6, setting="the test")
    order = SampleOrder(groups, seed=0, order=kind, step=6, whole_steps=True)
    assert (order.per_epoch, order.samples_per_epoch, order.left_out) == (12, 12, 2)
    seen = set()
    for step in range(30):
        samples = order.take(6 * step, 6)
        taken = [sample.signals.group for sample in samples]
        assert [taken.count(group) for group in taken] == [2] * 6
        assert taken[::2] == taken[1::2]
        seen |= set(taken)
    assert seen == (set(range(7)) if kind != "file" else set(range(6))), "each epoch drops another group"


def test_fewer_samples_than_a_step():
    with pytest.raises(ValueError, match=re.escape("batch.global_batch_size=6 is more than the 4 samples in the data")):
        SampleOrder(lines("a", "a", "b", "b"), seed=0, order="shuffled", step=6, whole_steps=True)
