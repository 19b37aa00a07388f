from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from mcore_prefix_tree import Sample, SampleError, Signals
from mcore_prefix_tree.signals import PER_TOKEN, Teacher

NAN = float("nan")


def sample(loss_mask=(0, 0, 1, 1, 0, 1), **signals):
    return Sample(
        tokens=range(len(loss_mask)), loss_mask=list(loss_mask), source="rollouts.jsonl:12", signals=Signals(**signals)
    )


def teacher(ids, logprobs, rows=6):
    return Teacher(token_ids=np.array([ids] * rows), logprobs=np.array([logprobs] * rows, dtype=np.float32))


@pytest.mark.parametrize(
    ("signals", "field", "says"),
    [
        ({"reward": "good"}, "reward", "must be numbers"),
        ({"reward": True}, "reward", "must be numbers"),
        ({"reward": NAN}, "reward", "must be a finite number"),
        ({"reward": [[1.0]]}, "reward", "must be a finite number"),
        ({"reward": [1.0, NAN]}, "reward", "must be a finite number"),
        ({"reward": [1.0]}, "reward", "has 1 entries, but 'loss_mask' scores 2 turns"),
        ({"reward": [1.0, 2.0], "turn": 2}, "reward", "has 2 entries, but this is turn 2, counted from 0"),
        ({"turn": -1}, "turn", "must be an integer from 0"),
        ({"turn": 1 << 70}, "turn", "must be an integer from 0"),
        ({"turn": 0.5}, "turn", "must be an integer from 0"),
        ({"turn": True}, "turn", "must be an integer from 0"),
        ({"reward": 10**400}, "reward", "must be numbers"),
        ({"old_logprobs": [0, 0, -1, 10**400, 0, -1]}, "old_logprobs", "must be numbers"),
        ({"old_logprobs": [0, 0, 0.9, -1, 0, -1]}, "old_logprobs", "has 0.9 at index 2; a log-probability is never"),
        ({"rollout_logprobs": [0, 0, -1, 0.2, 0, -1]}, "rollout_logprobs", "has 0.2 at index 3; a log-probability is"),
        ({"teacher": teacher([1, 2**32 + 5], [-1, -2])}, "teacher", "token ids that no vocabulary has at token 2"),
        ({"advantage": float("inf")}, "advantage", "is inf; it must be finite"),
        ({"advantage": [1.0, 2.0]}, "advantage", "has 2 entries but 'tokens' has 6"),
        ({"advantage": [[1.0]]}, "advantage", "must be a flat list of numbers"),
        ({"advantage": [0, 0, 0, NAN, 0, 0]}, "advantage", "has nan at index 3"),
        ({"chosen": True}, "chosen", "needs field 'pair'"),
        ({"pair": "q"}, "pair", "needs field 'chosen'"),
        ({"pair": "q", "chosen": 1}, "chosen", "must be true or false, not 1"),
        ({"label": "yes"}, "label", "must be true or false, not 'yes'"),
        ({"group": [1]}, "group", "must be hashable"),
        ({"teacher": teacher([1, 1], [-1, -2])}, "teacher", "token ids that are not different and >= 0 at token 2"),
        ({"teacher": teacher([1, -2], [-1, -2])}, "teacher", "token ids that are not different and >= 0 at token 2"),
        ({"teacher": teacher([1, 2], [-1, -np.inf])}, "teacher", "log-probabilities that are not finite at token 2"),
        (
            {"teacher": Teacher(token_ids=np.ones((6, 1), int), logprobs=np.full((6, 1), -1e39))},
            "teacher",
            "log-probabilities that are not finite at token 2",
        ),
        ({"teacher": teacher([1, 2], [-0.1, -0.1])}, "teacher", "more probability than 1 at token 2"),
        ({"teacher": teacher([1, 2], [-1, -2], rows=5)}, "teacher", "has 5 rows of 2 but 'tokens' has 6"),
        ({"teacher": teacher([], [])}, "teacher", "must both be 6 lists of k"),
        ({"teacher": teacher([1, 2], [-1])}, "teacher", "must both be 6 lists of k"),
        *[
            case
            for name in PER_TOKEN
            for case in [
                ({name: -1.0}, name, "must be a flat list of numbers"),
                ({name: [-1.0] * 5}, name, "has 5 entries but 'tokens' has 6; there must be one for each, null where"),
                ({name: ["a"] * 6}, name, "must be numbers"),
                *[({name: [None, 0, text, -1, 0, -1]}, name, "must be numbers") for text in ("-1", b"-1", False)],
                ({name: [0, 0, -1, NAN, 0, -1]}, name, "has nan at index 3, which 'loss_mask' scores"),
                ({name: [0, 0, -1, None, 0, -1]}, name, "has nan at index 3, which 'loss_mask' scores"),
                ({name: [0, 0, -1, -1, 0, float("-inf")]}, name, "has -inf at index 5"),
                ({name: [0, 0, 1e300, -1, 0, -1]}, name, "has 1e+300 at index 2"),
            ]
        ],
    ],
)
def test_a_malformed_field_is_named_with_its_source(signals, field, says):
    with pytest.raises(SampleError) as raised:
        sample(**signals)
    message = str(raised.value)
    assert message.startswith("rollouts.jsonl:12: field")
    assert field in message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("name", PER_TOKEN)
def test_unscored_values_may_be_unknown(name):
    values = getattr(sample(**{name: [None, NAN, -1, -2, float("inf"), -3]}).signals, name)
    assert values.dtype == np.float32
    assert values[[2, 3, 5]].tolist() == [-1, -2, -3]
    assert np.isnan(values[:2]).all()


def test_the_first_token_is_never_scored():
    assert sample(loss_mask=[1, 1], old_logprobs=[NAN, -1.0]).signals.old_logprobs[1] == -1


def test_doubles_stay_doubles_and_everything_else_is_single():
    for given, kept in [([-0.1] * 6, np.float32), (np.full(6, -0.1), np.float64), (np.full(6, -1, int), np.float32)]:
        assert sample(old_logprobs=given).signals.old_logprobs.dtype == kept


def test_rewards_and_advantages_are_a_number_or_an_array():
    assert sample(reward=1, advantage=np.float32(2)).signals.reward == 1.0
    assert isinstance(sample(reward=np.float64(1)).signals.reward, float)
    assert isinstance(sample(advantage=2).signals.advantage, float)
    assert sample(reward=[1, 2]).signals.reward.tolist() == [1.0, 2.0]
    assert sample(reward=[1, 2, 3], turn=2).signals.reward.tolist() == [1.0, 2.0, 3.0]
    assert sample(advantage=[NAN, NAN, 1, 2, NAN, 3]).signals.advantage[2:4].tolist() == [1.0, 2.0]


def test_signals_copy_their_arrays():
    given = np.full(6, -1.0)
    kept = sample(old_logprobs=given, reward=np.zeros(2)).signals
    given[2] = 9
    assert kept.old_logprobs[2] == -1
    for array in (kept.old_logprobs, kept.reward):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_sample_without_signals_has_empty_ones():
    assert Sample(tokens=[1]).signals.reward is None
    assert repr(Sample(tokens=[1]).signals) == "Signals()"
    assert repr(Signals(reward=1.0, pair="q")) == "Signals(reward=1.0, pair='q')"


def test_signals_are_keywords_of_a_sample():
    logprobs = [NAN, NAN, -1.0]
    flat = Sample([5, 6, 7], loss_mask=[0, 0, 1], advantage=0.5, old_logprobs=logprobs, group="p", mismatched=True)
    built = Sample(
        tokens=[5, 6, 7],
        loss_mask=[0, 0, 1],
        signals=Signals(advantage=0.5, old_logprobs=logprobs, group="p", mismatched=True),
    )
    assert repr(flat) == repr(built)
    assert flat.signals.old_logprobs.dtype == np.float32
    assert replace(flat, source="elsewhere").signals.advantage == 0.5
    for field in fields(Signals):
        assert getattr(Sample([5], **{field.name: field.default}).signals, field.name) == field.default


OF_SIGNALS = "those of its signals are reward, group, .*teach"
GIVEN_TWICE = r"^f:1: 'signals' and field 'advantage' are both given; set 'advantage' in"


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"old_logprobs": [-1.0]}, r"^f:1: field 'old_logprobs' has 1 entries but 'tokens' has 2"),
        ({"pair": "q"}, r"^f:1: field 'pair' needs field 'chosen'"),
        *(({"signals": Signals(advantage=0.5), "advantage": same}, GIVEN_TWICE) for same in (0.5, 0.25, None)),
        *(
            ({name: [0.0, 1.0], "signals": Signals()}, rf"^Sample has no field '{name}'; {OF_SIGNALS}")
            for name in ("advantages", "loss_masks", "is_scored")
        ),
    ],
)
def test_keywords_of_a_sample_are_checked(keywords, says):
    with pytest.raises(TypeError if "no field" in says else SampleError, match=says):
        Sample([5, 6], source="f:1", **keywords)
    # A sample that has signals, changed as dataclasses are, has them already.
    with pytest.raises(SampleError, match=r"'signals' and field 'reward' are both given"):
        replace(Sample([5, 6], advantage=0.5), reward=1.0)
