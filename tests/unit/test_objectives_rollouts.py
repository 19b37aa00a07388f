"""Groups of unequal sizes with one sample per turn: rewards count once per rollout, for any number of turns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_oracles import VOCAB, World, changed, policy_loss, random_cut, run_logprobs
from rollouts import advantages_by_hand, as_samples, rollouts, shapes

from mcore_prefix_tree import Sample, SampleError, Signals, fold
from mcore_prefix_tree.objectives import SupervisedFineTuning, make_objective

BASELINES = ["group_mean", "group_mean_std", "leave_one_out"]
# Complete rollouts, and the normalisation that gives their turns the same loss.
SAME = {"token": "token", "sample": "rollout", "group": "group"}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-12 * max(1e-3, float(other.norm())))


def table_of(samples: list[Sample], seed: int) -> World:
    """A model with the same output for a path in every world: it depends only on the tokens."""
    world = World.of(samples, seed)
    rows = np.empty((world.layout.padded_size, VOCAB))
    for index, sample in enumerate(samples):
        for t, flat in enumerate(world.layout.sample_tokens(index).tolist()):
            rows[flat] = np.random.default_rng([seed, *sample.tokens[: t + 1].tolist()]).standard_normal(VOCAB)
    with torch.no_grad():
        world.logits.copy_(torch.from_numpy(rows))
    return world


def by_path(world: World, grad: torch.Tensor) -> dict[bytes, torch.Tensor]:
    """Gradients by the path to a token."""
    return {
        sample.tokens[: t + 1].tobytes(): grad[flat]
        for index, sample in enumerate(world.samples)
        for t, flat in enumerate(world.layout.sample_tokens(index).tolist())
    }


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("per_turn", [False, True], ids=["a reward a rollout", "a reward a turn"])
@given(shape=shapes, seed=st.integers(0, 99))
def test_advantages_are_those_of_the_rollouts(baseline, per_turn, shape, seed):
    made = rollouts(shape, seed, vocab=VOCAB, per_turn=per_turn)
    _, turns = as_samples(made, seed, scale=0.3, around=-3.7)
    targets = make_objective("grpo", {"advantage": baseline, "alone": "zero"}).targets(turns)
    expected = [value for own in advantages_by_hand(made, baseline) for value in own]
    first = targets.scored.cu_lens[:-1]
    assert targets.columns["advantage"][first] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    per_sample = np.repeat(targets.columns["advantage"][first], targets.scored.lens)
    assert targets.columns["advantage"].tolist() == per_sample.tolist(), "every token of a turn has its turn's"
    total = sum(float(np.sum(rollout.reward)) for rollout in made)
    assert targets.metrics["reward"] == (pytest.approx(total), len(made))


@pytest.mark.parametrize("normalise", SAME)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"kl_coef": 0.04, "entropy_coef": 0.01}),
        ("grpo", {"advantage": "leave_one_out", "kl_coef": 0.2, "kl_in": "reward"}),
        ("dapo", {"tis_cap": 1.3}),
        ("dr_grpo", {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}),
    ],
    ids=["grpo", "rloo", "dapo", "dr_grpo"],
)
@given(shape=shapes, seed=st.integers(0, 99))
def test_turns_train_like_complete_rollouts(name, options, normalise, shape, seed):
    """Loss and gradient of one sample per turn equal those of one per rollout, token by token, for any cut."""
    check_turns(name, options, normalise, shape, seed)


OF_SEQUENCES = [
    ("gspo", {"clip_eps_low": 0.05, "clip_eps_high": 0.1}),
    ("grpo", {"tis_cap": 1.5, "tis_floor": 0.5, "tis_level": "sequence"}),
    ("cispo", {"surrogate_level": "sequence", "tis_cap": 3.0, "tis_level": "sequence", "on_policy": True}),
    ("dapo", {"off_policy_mask": 0.05, "tis_cap": 3.0, "tis_level": "sequence", "tis_mode": "mask"}),
    ("dr_grpo", {"kl_coef": 0.3, "kl_importance": "sequence", "advantage": "leave_one_out"}),
    ("gspo", {"on_policy": True, "kl_coef": 0.3, "kl_importance": "sequence", "filter_groups": True}),
]


@pytest.mark.parametrize("level", ["rollout", "turn"])
@pytest.mark.parametrize(
    ("name", "options"), OF_SEQUENCES, ids=[f"{name}{i}" for i, (name, _) in enumerate(OF_SEQUENCES)]
)
@given(shape=shapes, seed=st.integers(0, 99), normalise=st.sampled_from(list(SAME)))
def test_a_sequence_is_the_same_whether_turns_are_samples(name, options, level, normalise, shape, seed):
    """The rollouts are complete, too: a turn is then a run of scored tokens."""
    check_turns(name, options | {"ratio_level": level}, normalise, shape, seed)


def check_turns(name, options, normalise, shape, seed):
    shape = tuple(turns if len(turns) > 1 else (*turns, 2) for turns in shape)
    made = rollouts(shape, seed, vocab=VOCAB)
    wholes, turns = as_samples(made, seed, scale=0.3, around=-3.7)
    whole, cut_up = table_of(wholes, seed), table_of(turns, seed)
    if options.get("filter_groups"):  # as if these groups were not there
        equal = {own.group for own in made if len({o.reward for o in made if o.group == own.group}) == 1}
        wholes = [sample for sample, own in zip(wholes, made, strict=True) if own.group not in equal]
        whole = table_of(wholes, seed)
    expected = policy_loss(make_objective(name, options | {"normalise": normalise}), whole)
    wanted = by_path(whole, torch.autograd.grad(expected, whole.logits)[0])
    objective = make_objective(name, options | {"normalise": SAME[normalise]})
    apart = objective.together(turns) or range(len(turns))
    units = [[index for index, key in enumerate(apart) if key == own] for own in dict.fromkeys(apart)]
    for parts in (1, 3):
        cut = random_cut(units, parts, random.Random(seed))
        loss, _ = run_logprobs(objective, cut_up, cut)
        assert abs(loss.item() - expected.item()) <= 1e-12 * max(1.0, abs(expected.item()))
        got = by_path(cut_up, torch.autograd.grad(loss, cut_up.logits)[0])
        # A turn's sample ends with it: neither holds the tools' answers after the last turn.
        assert got.keys() == wanted.keys() or options.get("filter_groups")
        assert all(close(value, wanted.get(path, torch.zeros_like(value))) for path, value in got.items())


@pytest.mark.parametrize("normalise", ["sample", "sample_sum"])
@given(shape=shapes, seed=st.integers(0, 99))
def test_turns_may_count_as_samples(normalise, shape, seed):
    """The advantages are given to the oracle: only these are of the rollout, and each turn weighs as a sample does."""
    made = rollouts(shape, seed, vocab=VOCAB)
    _, turns = as_samples(made, seed, scale=0.3, around=-3.7)
    world = World.of(turns, seed)
    values = [value for own in advantages_by_hand(made, "group_mean_std") for value in own]
    given_ones = [changed(sample, advantage=value) for sample, value in zip(turns, values, strict=True)]
    oracle = World(samples=given_ones, layout=world.layout, logits=world.logits, scalar=world.scalar)
    options = {"normalise": normalise, "kl_coef": 0.1}
    expected = policy_loss(make_objective("grpo", options | {"advantage": "given"}), oracle)
    (wanted,) = torch.autograd.grad(expected, world.logits)
    objective = make_objective("grpo", options | {"alone": "zero"})
    loss, _ = run_logprobs(objective, world, [list(range(len(turns)))])
    assert abs(loss.item() - expected.item()) <= 1e-12 * max(1.0, abs(expected.item()))
    assert close(torch.autograd.grad(loss, world.logits)[0], wanted)


def turn(number: int, rollout: int, reward: float, group: str = "p") -> Sample:
    return Sample(
        tokens=[7, rollout, number, 1],
        loss_mask=[0, 0, 0, 1],
        source=f"f:{rollout} turn {number}",
        signals=Signals(reward=reward, group=group, rollout=rollout, turn=number),
    )


def test_group_of_one_rollout():
    samples = [turn(0, 1, 1.0), turn(1, 1, 1.0), turn(0, 2, 0.0, "q"), turn(0, 3, 1.0, "q")]
    for baseline in BASELINES:
        with pytest.raises(SampleError, match=r"^f:1 turn 0: group 'p' has only this rollout in the step.*alone=zero"):
            make_objective("grpo", {"on_policy": True, "advantage": baseline}).targets(samples)
        objective = make_objective("grpo", {"on_policy": True, "advantage": baseline, "alone": "zero"})
        advantage = objective.targets(samples).columns["advantage"]
        assert advantage[:2].tolist() == [0.0, 0.0]
        assert advantage[2] < 0 < advantage[3]


NORMALISERS = ["token", "sample", "sample_sum", "rollout", "group"]


@pytest.mark.parametrize("normalise", NORMALISERS)
def test_groups_of_equal_rewards_are_left_out(normalise):
    """By hand: the weights and the divisor are those of a step without them, the advantages those of the whole step."""
    dead = [turn(0, 1, 1.0), turn(1, 1, 1.0), turn(0, 2, 1.0)]
    live = [turn(0, 3, 1.0, "q"), turn(0, 4, 0.0, "q"), turn(1, 4, 0.0, "q")]
    options = {"on_policy": True, "normalise": normalise, "advantage": "group_mean_batch_std"}
    usual, alone = (make_objective("grpo", options).targets(samples) for samples in ([*dead, *live], live))
    targets = make_objective("grpo", options | {"filter_groups": True}).targets([*dead, *live])
    assert targets.weight.tolist() == [0.0, 0.0, 0.0, *alone.weight.tolist()]
    assert targets.divisor == alone.divisor < usual.divisor
    assert targets.columns["advantage"].tolist() == usual.columns["advantage"].tolist()
    assert targets.metrics == usual.metrics | {"filtered_groups": (1.0, 2.0)}
    nothing = make_objective("grpo", options | {"filter_groups": True}).targets(dead)
    assert (nothing.divisor, nothing.weight.tolist()) == (0, [0.0, 0.0, 0.0])
    assert nothing.metrics["filtered_groups"] == (1.0, 1.0)


def test_a_group_with_a_rollout_in_its_middle_is_not_left_out():
    """Its advantage is 0, and it is all of the group that is scored; nor is one that a divergence makes unequal."""
    unscored = [Sample(tokens=[7, 1], loss_mask=[0, 0], signals=Signals(reward=r, group="p")) for r in (0.0, 1.0)]
    middle = make_objective("grpo", {"on_policy": True, "filter_groups": True}).targets([turn(0, 1, 0.5), *unscored])
    assert (middle.divisor, middle.columns["advantage"].tolist()) == (1, [0.0])
    drifted = [
        changed(turn(0, rollout, 1.0), old_logprobs=[0, 0, 0, -1.0], ref_logprobs=[0, 0, 0, -float(rollout)])
        for rollout in (1, 2)
    ]
    penalised = {"kl_coef": 0.1, "kl_in": "reward", "filter_groups": True}
    assert make_objective("grpo", penalised).targets(drifted).divisor == 2


def test_turns_of_a_rollout_that_are_cut_apart_are_refused():
    samples = [turn(0, 1, 1.0), turn(1, 1, 1.0), turn(0, 2, 0.0)]
    objective = make_objective("gspo", {"on_policy": True})
    assert objective.together(samples) == [("p", 1), ("p", 1), ("p", 2)]
    assert objective.together(samples[1:]) is None
    for other in ({"ratio_level": "turn"}, {"surrogate_level": "token"}):
        assert make_objective("gspo", {"on_policy": True} | other).together(samples) is None
    with pytest.raises(ValueError, match="f:1 turn 0 and f:1 turn 1 are of one rollout but not in one micro-batch"):
        objective.targets(samples).rows(fold(samples[1:]), [1, 2])
    off_policy = {"tis_cap": 2.0, "tis_level": "sequence", "advantage": "given"}
    assert make_objective("dapo", off_policy).together(samples) is None, "its weights are known before the step"
    assert make_objective("dapo", off_policy).grouped_by == "rollout"
    assert make_objective("dapo", off_policy | {"ratio_level": "turn"}).grouped_by is None


def test_supervised_training_by_rollout():
    samples = [turn(0, 1, 1.0), turn(0, 2, 0.0), turn(1, 2, 0.0), Sample(tokens=[1, 2, 3])]
    targets = SupervisedFineTuning(normalise="rollout").targets(samples)
    assert targets.divisor == 3, "a sample that names no rollout is one"
    assert targets.weight.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5]
    unscored = Sample(tokens=[1, 2], loss_mask=[0, 0])
    assert SupervisedFineTuning(normalise="rollout").targets([unscored, *samples]).count.tolist() == [0, 1, 1, 0, 1]
    assert SupervisedFineTuning(normalise="rollout").targets([]).divisor == 0
