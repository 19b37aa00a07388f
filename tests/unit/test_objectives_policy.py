from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from harness.losses import divided
from harness.oracles import sample_lists, worst
from hypothesis import given
from hypothesis import strategies as st
from objective_oracles import World, changed, check_cuts, policy_loss, run_logprobs, with_signals

from mcore_prefix_tree import Sample, SampleError, Signals, fold
from mcore_prefix_tree.objectives import OBJECTIVES, PolicyGradient, make_objective
from mcore_prefix_tree.objectives.kl import LOG_RATIO_LIMIT, kl_estimate
from mcore_prefix_tree.objectives.metrics import NO_SAMPLE, add_means, not_finite

SETTINGS = [
    ("reinforce", {}),
    ("rloo", {"kl_coef": 0.1, "kl_in": "reward"}),
    ("ppo", {"lam": 0.9, "gamma": 0.97, "dual_clip": 1.5}),
    ("ppo", {"lam": 0.95, "whiten": False, "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k3"}),
    ("grpo", {"kl_coef": 0.04}),
    ("grpo", {"kl_coef": 0.04, "kl_estimator": "k2", "entropy_coef": 0.01, "normalise": "group"}),
    ("grpo", {"kl_coef": 0.3, "kl_estimator": "k1", "kl_importance": "token", "advantage": "given"}),
    ("grpo", {"on_policy": True, "tis_cap": 1.3, "kl_coef": 0.3, "kl_importance": "token"}),
    ("gspo", {"kl_coef": 0.3, "kl_importance": "sequence"}),
    ("grpo", {"on_policy": True, "kl_coef": 0.3, "kl_importance": "sequence"}),
    ("dr_grpo", {"normalise_length": 7.0}),
    ("dapo", {"tis_cap": 1.2, "dual_clip": 3.0}),
    ("dapo", {"tis_cap": 2.0, "tis_level": "sequence", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2"}),
    ("dapo", {"tis_cap": 1.3, "tis_floor": 0.8, "advantage": "group_mean_batch_std"}),
    ("grpo", {"tis_cap": 1.3, "tis_floor": 0.8, "tis_mode": "mask"}),
    ("grpo", {"tis_cap": 3.0, "tis_floor": 0.3, "tis_mode": "mask", "tis_level": "sequence", "on_policy": True}),
    ("grpo", {"off_policy_mask": 0.1, "kl_coef": 0.1}),
    ("grpo", {"filter_groups": True, "kl_coef": 0.1, "entropy_coef": 0.01}),
    ("gspo", {"clip_eps_low": 0.05, "clip_eps_high": 0.1}),
    ("gspo", {"clip_eps_low": 0.05, "clip_eps_high": 0.1, "ratio_level": "turn", "normalise": "sample"}),
    ("dapo", {"tis_cap": 2.0, "tis_level": "sequence", "ratio_level": "turn"}),
    ("gspo", {"clip_eps_low": 0.1, "clip_eps_high": 0.1, "advantage": "given"}),
    ("cispo", {"clip_eps_low": 0.2, "clip_eps_high": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=[f"{name}{i}" for i, (name, _) in enumerate(SETTINGS)])
@given(data=st.data())
def test_loss_equals_unfolded_samples_for_any_cut(name, options, data):
    samples = data.draw(sample_lists(max_samples=9, min_samples=4))
    seed = data.draw(st.integers(0, 99))
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    objective = make_objective(name, options)
    alone = [[index] for index in range(len(samples))]
    loss_of = lambda cut: run_logprobs(objective, world, cut)[0]  # noqa: E731
    check_cuts(policy_loss(objective, world), world.logits, alone, seed, loss_of)


def pairs_of_rollouts(**fields):
    """A prompt with two rollouts, and their old log-probabilities."""
    return [
        Sample(
            tokens=[5, 6, *completion],
            loss_mask=[0, 0, *([1] * len(completion))],
            source=f"rollouts.jsonl:{line}",
            signals=Signals(reward=reward, group="p", old_logprobs=[np.nan, np.nan, *old], **fields),
        )
        for line, (completion, reward, old) in enumerate(
            [([1, 2, 3], 1.0, [-1.0, -2.0, -1.5]), ([1, 4], 0.0, [-1.0, -3.0])]
        )
    ]


def flat(values_of_sample, layout):
    """``[P]`` from per-sample rows that agree on shared tokens."""
    values = torch.zeros(layout.padded_size, dtype=torch.float64)
    for index, row in enumerate(values_of_sample):
        values[layout.sample_tokens(index)] = torch.tensor(row, dtype=torch.float64)
    return values.requires_grad_()


def test_grpo_by_hand():
    samples = pairs_of_rollouts()
    layout = fold(samples)
    targets = make_objective("grpo").targets(samples)
    # Rewards 1 and 0: mean 1/2, unbiased std sqrt(1/2).
    a = 0.5 / (0.5**0.5 + 1e-6)
    assert targets.columns["advantage"] == pytest.approx([a, a, a, -a, -a])
    assert targets.divisor == 2
    rows = targets.rows(layout, [0, 1])
    logprob = flat([[0, 0, -1.0, -1.9, -1.0], [0, 0, -1.0, -3.5]], layout)
    output = make_objective("grpo").loss(logprob, None, rows)
    # Ratios: 1, e^0.1 = 1.105, e^0.5 cut to 1.2 | 1, e^-0.5 cut to 0.8.
    first = -a * (1 + np.exp(0.1) + 1.2) / 3
    second = a * (1 + 0.8) / 2
    assert output.loss.item() == pytest.approx(first + second)
    (grad,) = torch.autograd.grad(output.loss, logprob)
    shared, second_token, cut, other = (
        layout.sample_tokens(0)[2],
        *layout.sample_tokens(0)[3:],
        layout.sample_tokens(1)[3],
    )
    assert grad[shared].item() == pytest.approx(-a / 3 + a / 2)  # both samples' parts
    assert grad[second_token].item() == pytest.approx(-a * np.exp(0.1) / 3)
    assert grad[cut] == grad[other] == 0
    metrics = divided(output.metrics)
    assert metrics["clip_fraction"] == pytest.approx(2 / 5)
    assert metrics["ratio"] == pytest.approx((2 + np.exp(0.1) + np.exp(0.5) + np.exp(-0.5)) / 5)
    assert targets.metrics["reward"] == (1.0, 2.0)


def test_gspo_is_the_sequence_ratio_of_its_paper():
    """Differentiating s_i = exp(mean of log ratios) itself, eq. 5 and 7, without the token form's stop-gradients."""
    samples = pairs_of_rollouts()
    layout = fold(samples)
    objective = make_objective("gspo", {"clip_eps_low": 0.4, "clip_eps_high": 0.1})
    targets = objective.targets(samples)
    logprob = flat([[0, 0, -1.0, -1.9, -1.0], [0, 0, -1.0, -3.5]], layout)
    loss = objective.loss(logprob, None, targets.rows(layout, [0, 1])).loss / targets.divisor
    expected = 0
    for index, sample in enumerate(samples):
        own = logprob[torch.from_numpy(layout.sample_tokens(index)).long()][2:]
        s = torch.exp((own - torch.from_numpy(sample.signals.old_logprobs[2:]).double()).mean())
        a = targets.columns["advantage"][3 * index]
        expected = expected - torch.minimum(s * a, s.clamp(0.6, 1.1) * a) / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    grads = [torch.autograd.grad(x, logprob)[0] for x in (loss, expected)]
    assert worst(*grads) < 1e-12
    assert grads[0].any()


def test_ratios_of_an_unchanged_policy_are_one_to_the_bit():
    samples = pairs_of_rollouts()
    layout = fold(samples)
    rng = np.random.default_rng(0)
    logprob = torch.from_numpy(-rng.exponential(size=layout.padded_size).astype(np.float32))
    scored = [changed(s, old_logprobs=logprob[layout.sample_tokens(i)].numpy()) for i, s in enumerate(samples)]
    for name in ("grpo", "gspo", "cispo"):
        objective = make_objective(name)
        output = objective.loss(logprob, None, objective.targets(scored).rows(layout, [0, 1]))
        assert output.metrics["ratio"].tolist() == [5.0, 5.0]
        assert output.metrics["clip_fraction"][0] == output.metrics["kl_old"][0] == 0


def test_k3_is_constant_instead_of_overflowing():
    difference = torch.tensor([-19.0, -LOG_RATIO_LIMIT, -20.1, -40.0, -1000.0, 3.0], requires_grad=True)
    value = kl_estimate(difference, torch.zeros(()), "k3")
    (slope,) = torch.autograd.grad(value.sum(), difference)
    assert value[1] == value[2] == value[3] == value[4]
    assert value[0] < value[1]
    assert slope[0] < -1e8
    assert slope[2:5].tolist() == [0, 0, 0], "no loss is smaller further away from the reference"
    assert slope[5] == pytest.approx(1 - math.exp(-3))


def test_distance_to_the_old_policy_does_not_cancel_within_a_sequence():
    samples = pairs_of_rollouts()
    layout = fold(samples)
    old = np.zeros(layout.padded_size)
    for index, sample in enumerate(samples):
        old[layout.sample_tokens(index)] = np.nan_to_num(sample.signals.old_logprobs)
    moved = torch.from_numpy(old)
    own = layout.sample_tokens(0)[3:]  # its own two tokens
    moved[own] += torch.tensor([0.8, -0.8], dtype=torch.float64)
    objective = make_objective("gspo")
    metrics = divided(objective.loss(moved, None, objective.targets(samples).rows(layout, [0, 1])).metrics)
    assert metrics["ratio"] == pytest.approx(1)
    assert metrics["kl_old"] == pytest.approx((math.exp(0.8) - 1.8 + math.exp(-0.8) - 0.2) / 5)


def test_the_divergence_that_is_taken_off_the_rewards_is_reported():
    samples = [changed(sample, ref_logprobs=sample.signals.old_logprobs - 0.5) for sample in pairs_of_rollouts()]
    targets = make_objective("grpo", {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}).targets(samples)
    total, weight = targets.metrics["kl"]
    assert weight == 5
    assert total / weight == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_a_rollout_without_turns_earns_nothing():
    alone = Sample(tokens=[5, 6], loss_mask=[0, 0], signals=Signals(reward=[], group="q"))
    targets = PolicyGradient(on_policy=True, alone="zero").targets([*pairs_of_rollouts(), alone])
    assert len(targets.columns["advantage"]) == 5
    assert targets.metrics["reward"] == (1.0, 3.0)


def test_a_group_of_equal_rewards_has_no_advantage_at_all():
    samples = [
        Sample(tokens=[1, 2, line], signals=Signals(reward=0.1, group=0), loss_mask=[0, 0, 1]) for line in range(3)
    ]
    for advantage in ("group_mean", "group_mean_std", "leave_one_out"):
        objective = PolicyGradient(advantage=advantage, on_policy=True)
        assert not objective.targets(samples).columns["advantage"].any()
    assert objective.targets(samples).metrics["zero_advantage"] == (3.0, 3.0)


@pytest.mark.parametrize(
    ("options", "fields", "says"),
    [
        ({}, {"old_logprobs": None}, "field 'old_logprobs' is missing, and this objective without on_policy=true"),
        ({}, {"reward": None}, "field 'reward' is missing, and advantage=group_mean_std needs it"),
        ({}, {"group": None}, "field 'group' is missing"),
        ({}, {"group": "q"}, "group 'p' has only this rollout in the step"),
        ({"advantage": "leave_one_out"}, {"group": "q"}, "group 'p' has only this rollout in the step"),
        ({"kl_coef": 0.1}, {}, "field 'ref_logprobs' is missing, and kl_coef=0.1 needs it"),
        ({"tis_cap": 2.0}, {}, "field 'rollout_logprobs' is missing, and tis_cap=2.0 needs it"),
        ({"off_policy_mask": 0.5}, {}, "field 'rollout_logprobs' is missing, and off_policy_mask=0.5 needs it"),
        ({"advantage": "given"}, {}, "field 'advantage' is missing, and advantage=given needs it"),
        ({"advantage": "gae"}, {}, "field 'values' is missing"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, {}, "field 'ref_logprobs' is missing, and kl_in=reward needs it"),
        ({}, {"rollout": 1}, None),
    ],
)
def test_error_names_sample_and_missing_field(options, fields, says):
    samples = pairs_of_rollouts()
    samples[1] = changed(samples[1], **fields)
    objective = make_objective("grpo", options)
    if says is None:
        objective.targets(samples)
        return
    with pytest.raises(SampleError) as raised:
        objective.targets(samples)
    assert str(raised.value).startswith("rollouts.jsonl:")
    assert says in str(raised.value)


def test_samples_of_one_rollout_must_agree_on_its_reward():
    samples = [changed(s, rollout="r") for s in pairs_of_rollouts()]
    with pytest.raises(SampleError, match=r"^rollouts.jsonl:1: field 'reward' differs from that of rollouts.jsonl:0"):
        PolicyGradient(advantage="reward").targets(samples)


def test_turns_have_no_generalized_advantage():
    samples = [changed(s, turn=0, values=np.zeros(len(s))) for s in pairs_of_rollouts()]
    with pytest.raises(SampleError, match=r"^rollouts.jsonl:0: field 'turn' is set, and advantage=gae"):
        make_objective("ppo").targets(samples)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1 has no expected gradient in the loss"),
        ({"kl_coef": 0.1, "kl_in": "reward", "advantage": "given"}, "kl_in=reward changes rewards"),
        ({"normalise_length": 3.0}, r"normalise_length=3\.0 has no effect without normalise=sample_sum; remove it"),
        ({"surrogate": "cispo", "dual_clip": 3}, r"dual_clip=3\.0 has no effect without surrogate=clip; remove it"),
        ({"surrogate": "reinforce", "clip_eps_low": 0.1}, r"clip_eps_low=0\.1 has no effect without surrogate=clip or"),
        ({"surrogate": "reinforce", "clip_eps_high": 0.1}, r"clip_eps_high=0\.1 has no effect without surrogate=clip"),
        ({"ratio_level": "turn"}, "ratio_level=turn has no effect without surrogate_level=sequence, or"),
        ({"advantage": "given", "filter_groups": True}, "filter_groups=True has no effect without an advantage that"),
        (
            {"surrogate": "reinforce", "surrogate_level": "sequence"},
            "surrogate_level=sequence has no effect without sur",
        ),
        ({"gamma": 0.9}, r"gamma=0\.9 has no effect without advantage=gae"),
        ({"lam": 0.9}, r"lam=0\.9 has no effect without advantage=gae"),
        ({"tis_level": "sequence"}, "tis_level=sequence has no effect without tis_cap"),
        ({"tis_mode": "mask"}, "tis_mode=mask has no effect without tis_cap"),
        ({"tis_floor": 0.5}, r"tis_floor=0\.5 has no effect without tis_cap"),
        ({"tis_floor": 2, "tis_cap": 1.5}, r"tis_floor=2\.0 is above tis_cap=1\.5"),
        ({"kl_in": "reward", "kl_importance": "token"}, "kl_importance=token has no effect without kl_in=loss"),
        ({"advantage": "gae", "alone": "zero"}, "alone=zero has no effect without an advantage that compares"),
        ({"advantage": "group_mean", "advantage_eps": 1e-4}, r"advantage_eps=0\.0001 has no effect without whiten"),
        ({"clip_eps": 0.2}, "clip_eps"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"clip_eps_low": float("nan")}, "clip_eps_low"),
    ],
)
def test_invalid_settings_are_rejected(options, says):
    with pytest.raises(ValueError, match=says):
        make_objective("grpo", options)


def test_an_objective_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"there is no objective 'grop'; there are cispo, .*grpo"):
        make_objective("grop")
    assert set(OBJECTIVES) >= {"sft", "grpo", "dpo", "kto", "critic", "reward_model", "distill"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_output_that_is_not_finite_names_its_sample(value):
    samples = pairs_of_rollouts()
    layout = fold(samples)
    objective = make_objective("grpo")
    rows = objective.targets(samples).rows(layout, [0, 1])
    logprob = torch.zeros(layout.padded_size)
    assert objective.loss(logprob, None, rows).bad_sample == NO_SAMPLE
    logprob[layout.sample_tokens(1)[0]] = value  # never scored
    assert objective.loss(logprob, None, rows).bad_sample == NO_SAMPLE
    logprob[layout.sample_tokens(1)[-1]] = value
    assert objective.loss(logprob, None, rows).bad_sample == 1
    told = str(not_finite(samples[1]))
    assert told.startswith("rollouts.jsonl:1: the model's output for this sample is NaN or infinite")


def test_a_ratio_beyond_all_bounds_has_no_nan_gradient():
    samples = pairs_of_rollouts()
    layout = fold(samples)
    objective = make_objective("grpo", {"dual_clip": 3.0})
    logprob = torch.full((layout.padded_size,), 500.0, requires_grad=True)
    output = objective.loss(logprob, None, objective.targets(samples).rows(layout, [0, 1]))
    assert torch.isfinite(output.loss)
    assert not torch.autograd.grad(output.loss, logprob)[0].any()


def test_metrics_do_not_depend_on_the_cut():
    samples = [
        Sample(
            tokens=[1, 2, 3, *range(line)],
            signals=Signals(reward=float(line % 2), group=0),
            loss_mask=[0, 0, *[1] * (line + 1)],
        )
        for line in range(5)
    ]
    world = World.of(with_signals(samples, 3, table_seed=3), 3)
    objective = make_objective("grpo", {"kl_coef": 0.1, "tis_cap": 1.1})
    results = []
    for cut in ([[0, 1, 2, 3, 4]], [[4, 0], [], [2], [1, 3]]):
        _, outputs = run_logprobs(objective, world, cut)
        results.append(divided(add_means(output.metrics for output in outputs)))
    assert results[0].keys() >= {"ratio", "clip_fraction", "kl", "kl_old", "entropy", "tis_weight", "tis_outside"}
    assert results[0] == pytest.approx(results[1], rel=1e-12)
