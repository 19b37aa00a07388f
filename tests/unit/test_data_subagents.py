"""Groups as agents make them: samples of one rollout have other prompts, and lines of other groups lie between."""

from __future__ import annotations

import json
import re

import pytest
from data_sources import Words, write_files
from harness.commands import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import LineOptions, iter_sample_groups
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.objectives import make_objective


def line(group, rollout=None, turn=None, *, prompt, answer=1, reward=0.0, mask=None):
    given = {"group": group, "rollout": rollout, "turn": turn, "reward": reward}
    tokens = [*prompt, answer]
    mask = [0] * len(prompt) + [1] if mask is None else mask
    return {"tokens": tokens, "loss_mask": mask} | {k: v for k, v in given.items() if v is not None}


def held(paths, by="group", step=None):
    return whole_groups(list(iter_sample_groups(paths)), by, step=step, setting="the test")


def grouped(folder, lines, by="group"):
    return held(write_files(folder, [json.dumps(one) for one in lines]), by)


MAIN, SUB, OTHER = [11, 12, 13], [70, 71], [90]
INTERLEAVED = [
    line("q", "r0", 0, prompt=MAIN),
    line("q", "r0", 1, prompt=SUB),
    line("z", "s0", prompt=OTHER),
    line("q", "r1", 0, prompt=MAIN, answer=2),
    line("q", "r1", 1, prompt=[*SUB, 72]),
    line("z", "s1", prompt=OTHER, answer=2),
]


def test_subagents_of_interleaved_groups_are_members(tmp_path):
    groups = grouped(tmp_path, INTERLEAVED)
    assert [[one.source.rpartition(":")[2] for one in group] for group in groups] == [list("1245"), list("36")]


@pytest.mark.parametrize(
    "lines",
    [
        [1, 2, 4, 0, 3, 5],  # a subagent's sample before its main agent's
        [0, 2, 1, 3, 5],  # one rollout spawned no subagent
        [0, 2, 3, 5, 4, 1],  # also a rollout's lines apart
    ],
)
def test_order_and_number_of_a_rollouts_lines_are_free(tmp_path, lines):
    groups = grouped(tmp_path, [INTERLEAVED[at] for at in lines])
    assert sorted(map(len, groups)) == [2, len(lines) - 2]


def test_rollouts_with_lines_apart(tmp_path):
    lines = [INTERLEAVED[at] for at in (0, 3, 1, 4, 2, 5)]
    assert [len(group) for group in grouped(tmp_path, lines, by="rollout")] == [2, 2, 1, 1]


@settings(max_examples=40)
@given(st.data())
def test_any_order_of_named_samples_makes_the_same_groups(tmp_path_factory, data):
    """Groups of rollouts of a main agent and of subagents."""
    lines = []
    for group in range(data.draw(st.integers(1, 3))):
        for rollout in range(data.draw(st.integers(1, 3))):
            turns = data.draw(st.lists(st.sampled_from(["main", "sub"]), max_size=3))
            for turn, kind in enumerate(["main", *turns]):
                own = [group, 30 + turn] if kind == "main" else [50 + data.draw(st.integers(0, 20))]
                lines.append(line(group, rollout, turn, prompt=[group] if turn == 0 else own, answer=rollout))
    lines = data.draw(st.permutations(lines))
    groups = grouped(tmp_path_factory.mktemp("files"), lines)
    expected = {}
    for number, one in enumerate(lines, start=1):
        expected.setdefault(one["group"], []).append(number)
    assert [[int(one.source.rpartition(":")[2]) for one in group] for group in groups] == list(expected.values())


def test_subagents_lines_count_on_with_expanded_turns(tmp_path):
    """The record's turn is that of its first; the rewards of all turns are the rollout's."""

    def chat(rollout, turn, messages, text):
        roles = ("user", "assistant") * (messages // 2)
        said = [{"role": role, "content": text} for role in roles]
        return {"messages": said, "group": "q", "rollout": rollout, "turn": turn, "reward": [0.0, 1.0, 2.0]}

    path = tmp_path / "chats.jsonl"
    rows = [chat("r0", 0, 4, "a"), chat("r1", 0, 4, "a"), chat("r0", 2, 2, "b"), chat("r1", 2, 2, "b")]
    write_rows(path, rows)
    options = LineOptions(tokenizer=Words(), expand_turns=True)
    (group,) = whole_groups(list(iter_sample_groups(path, options)), "group", step=None, setting="the test")
    assert [(one.signals.rollout, one.signals.turn) for one in group] == [
        ("r0", 0), ("r0", 1), ("r1", 0), ("r1", 1), ("r0", 2), ("r1", 2),
    ]  # fmt: skip
    targets = make_objective("reinforce").targets(group)
    assert targets.columns["advantage"].tolist() == [3, 3, 3, 3, 2, 2], "the rewards of this and all later turns"


@pytest.mark.parametrize(("turn", "says"), [("x", "not 'x'"), (-1, "not -1"), (True, "not True")])
def test_turn_of_an_expanded_record_is_checked(tmp_path, turn, says):
    path = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "turn": turn}
    path.write_text(json.dumps(row))
    with pytest.raises(
        SampleError, match=f"chats.jsonl:1: field 'turn' must be an integer from 0 to 2147483647, {says}$"
    ):
        list(iter_sample_groups(path, LineOptions(tokenizer=Words(), expand_turns=True)))


def test_subagents_count_their_rollouts_reward_once(tmp_path):
    """Rollouts differ in size: the baseline is that of rollouts, and each sample has its rollout's advantage."""
    lines = [
        line("q", "r0", 0, prompt=MAIN, reward=1.0),
        line("q", "r1", 0, prompt=MAIN, reward=0.0),
        line("q", "r0", 1, prompt=SUB, reward=1.0),
        line("q", "r0", 2, prompt=OTHER, reward=1.0),
        line("q", "r2", 0, prompt=MAIN, reward=-4.0),
    ]
    paths = write_files(tmp_path, [json.dumps(one) for one in lines])
    samples = [sample for group in held(paths) for sample in group]
    targets = make_objective("dr_grpo", {"on_policy": True}).targets(samples)
    assert targets.columns["advantage"].tolist() == [2, 1, 2, 2, -3]
    lines[2]["reward"] = 0.5
    paths = write_files(tmp_path, [json.dumps(one) for one in lines])
    samples = [sample for group in held(paths) for sample in group]
    says = f"{paths[0]}:3: field 'reward' differs from that of {paths[0]}:1, which belongs to the same rollout 'r0'"
    with pytest.raises(SampleError, match=re.escape(says)):
        make_objective("dr_grpo", {"on_policy": True}).targets(samples)
