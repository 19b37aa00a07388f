"""The training signals of JSON lines, for example rewards: their values, and errors by file, line and field."""

from __future__ import annotations

import numpy as np
import pytest
from data_sources import CHAT, CharacterTokenizer

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.objectives import make_objective

TOKENS = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}


def test_every_field_is_read(read):
    (sample,) = read(
        TOKENS
        | {
            "reward": 1,
            "group": "p7",
            "rollout": 3,
            "turn": 0,
            "advantage": [None, 0.5, -0.5],
            "old_logprobs": [None, -0.5, -1],
            "ref_logprobs": [0, -0.25, -1],
            "rollout_logprobs": [0, -0.75, -1],
            "values": [0, 1, 2],
            "returns": [0, 3, 4],
            "pair": 9,
            "chosen": False,
            "label": True,
            "mismatched": True,
            "teacher": {"token_ids": [[1, 2]] * 3, "logprobs": [[-1, -2]] * 3},
            "temperature_of_the_day": "ignored",
        }
    )
    signals = sample.signals
    assert (signals.reward, signals.group, signals.rollout, signals.turn) == (1.0, "p7", 3, 0)
    assert (signals.pair, signals.chosen, signals.label, signals.mismatched) == (9, False, True, True)
    assert signals.advantage[1:].tolist() == [0.5, -0.5]
    assert signals.old_logprobs[1:].tolist() == [-0.5, -1]
    assert signals.ref_logprobs.tolist() == [0, -0.25, -1]
    assert signals.rollout_logprobs.tolist() == [0, -0.75, -1]
    assert signals.values.tolist() == [0, 1, 2]
    assert signals.returns.tolist() == [0, 3, 4]
    assert signals.teacher.token_ids.tolist() == [[1, 2]] * 3
    assert signals.teacher.logprobs.dtype == np.float32


def test_null_is_not_given(read):
    (sample,) = read(TOKENS | {"reward": None, "old_logprobs": None, "teacher": None})
    assert repr(sample.signals) == "Signals()"


def test_logprobs_that_were_written_in_single_precision_come_back_to_the_bit(read):
    given = np.array([0, -1 / 3, -1e-7], dtype=np.float32)
    (sample,) = read(TOKENS | {"old_logprobs": given.tolist()})
    assert sample.signals.old_logprobs.tobytes() == given.tobytes()


def test_turns_of_a_conversation_are_one_rollout(read):
    rows = [{"messages": CHAT, "reward": reward, "group": 0} for reward in (1.0, 3.0, [1.0, 2.0])]
    samples = read(*rows, tokenizer=CharacterTokenizer(), expand_turns=True)
    assert [s.signals.turn for s in samples] == [0, 1] * 3
    assert [s.signals.rollout for s in samples] == [s.source.split(" ")[0] for s in samples]
    targets = make_objective("dr_grpo", {"on_policy": True}).targets(samples)
    by_sample = targets.columns["advantage"][targets.scored.cu_lens[:-1]]
    # The rewards of the group are 1, 3, 1 and 2; the last rollout's first turn also gets the reward of its second.
    assert by_sample.tolist() == [-0.75, -0.75, 1.25, 1.25, -0.75 + 0.25, 0.25]
    whole = read(*rows, tokenizer=CharacterTokenizer())
    assert [s.signals.rollout for s in whole] == [None] * 3
    advantage = make_objective("dr_grpo", {"on_policy": True}).targets(whole).columns["advantage"]
    assert advantage.tolist() == targets.columns["advantage"].tolist()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (TOKENS | {"reward": True}, "field 'reward' must be numbers, not true or false"),
        (TOKENS | {"old_logprobs": [0, True, -1]}, "field 'old_logprobs' must be numbers, not true or false"),
        (TOKENS | {"old_logprobs": [0, -1]}, "field 'old_logprobs' has 2 entries but 'tokens' has 3"),
        (TOKENS | {"old_logprobs": [0, None, -1]}, "field 'old_logprobs' has nan at index 1"),
        (TOKENS | {"group": ["p"]}, "field 'group' must be a string, a finite number or a boolean"),
        (
            TOKENS | {"pair": float("nan"), "chosen": True},
            "field 'pair' must be a string, a finite number or a boolean",
        ),
        (TOKENS | {"group": float("inf")}, "field 'group' must be a string, a finite number or a boolean"),
        (TOKENS | {"rollout": float("-inf")}, "field 'rollout' must be a string, a finite number or a boolean"),
        (
            TOKENS | {"pair": float("inf"), "chosen": True},
            "field 'pair' must be a string, a finite number or a boolean",
        ),
        (TOKENS | {"chosen": True}, "field 'chosen' needs field 'pair'"),
        (TOKENS | {"teacher": [[1, 2]]}, "field 'teacher' must be an object with 'token_ids' and 'logprobs'"),
        (TOKENS | {"teacher": {"token_ids": [[1], [1, 2], [3]], "logprobs": [[-1]] * 3}}, "must both be 3 lists of k"),
        (
            TOKENS | {"teacher": {"token_ids": [[1]] * 3, "logprobs": [[-1], [-1, -2], [-1]]}},
            "'teacher.logprobs' must be",
        ),
        (TOKENS | {"teacher": {"token_ids": [[1]] * 3, "logprobs": [["a"]] * 3}}, "'teacher.logprobs' must be numbers"),
        (
            TOKENS | {"teacher": {"token_ids": [[1]] * 3, "logprobs": [["-1"]] * 3}},
            "'teacher.logprobs' must be numbers",
        ),
        (
            TOKENS | {"teacher": {"token_ids": [[1]] * 3, "logprobs": [[None], ["-1"], [-1]]}},
            "logprobs' must be numbers",
        ),
        (TOKENS | {"teacher": {"token_ids": [["1"]] * 3, "logprobs": [[-1]] * 3}}, "must both be 3 lists of k"),
        (
            TOKENS | {"teacher": {"token_ids": [[None], ["1"], [2]], "logprobs": [[-1]] * 3}},
            "must both be 3 lists of k",
        ),
        (
            TOKENS | {"teacher": {"token_ids": [[1]] * 3, "logprobs": [[-1], [10**400], [-1]]}},
            "logprobs' must be numbers",
        ),
        (TOKENS | {"values": [None, "0.5", 1]}, "field 'values' must be numbers"),
        (TOKENS | {"advantage": [None, 0.5, "0.5"]}, "field 'advantage' must be numbers"),
        (TOKENS | {"reward": [None, "1"]}, "field 'reward' must be numbers"),
        ({"messages": CHAT, "old_logprobs": [0]}, "field 'old_logprobs' goes with 'tokens'"),
        ({"messages": CHAT, "teacher": {}}, "field 'teacher' goes with 'tokens'"),
        ({"messages": CHAT, "advantage": [1]}, "field 'advantage' must be a single number with 'messages'"),
        ({"messages": CHAT, "reward": [1, 2, 3]}, "field 'reward' has 3 entries"),
    ],
)
@pytest.mark.parametrize("expand_turns", [False, True])
def test_mistakes_are_named(read, row, says, expand_turns):
    with pytest.raises(SampleError) as raised:
        read(row, tokenizer=CharacterTokenizer(), expand_turns=expand_turns)
    assert "rollouts.jsonl:1" in str(raised.value)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_teacher_tokens_are_checked_against_the_vocabulary(read):
    row = {"tokens": [1, 2, 3], "teacher": {"token_ids": [[999], [3], [99]], "logprobs": [[0], [-1], [-1]]}}
    assert read(row, vocab_size=100)[0].signals.teacher.token_ids.tolist() == [[999], [3], [99]]
    with pytest.raises(SampleError, match=r"field 'teacher' has .* at index 2, outside the model's vocabulary of 99"):
        read(row, vocab_size=99)


def test_a_side_of_a_pair_is_one_sample(read):
    row = {"messages": CHAT, "pair": 1, "chosen": True}
    assert read(row, tokenizer=CharacterTokenizer())[0].signals.chosen
    assert read(row | {"messages": CHAT[:2]}, tokenizer=CharacterTokenizer(), expand_turns=True)[0].signals.chosen
    with pytest.raises(SampleError, match=r"rollouts.jsonl:1: field 'pair' compares complete conversations, but"):
        read(row, tokenizer=CharacterTokenizer(), expand_turns=True)
