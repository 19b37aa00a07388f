from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.losses import divided
from harness.oracles import sample_lists
from hypothesis import given
from hypothesis import strategies as st
from objective_oracles import World, changed, check_cuts, critic_loss, reward_model_loss, run_values, with_signals

from mcore_prefix_tree import Sample, SampleError, Signals, fold
from mcore_prefix_tree.objectives import Critic, RewardModel
from mcore_prefix_tree.objectives.metrics import add_means


@pytest.mark.parametrize(
    "objective",
    [
        Critic(),
        Critic(clip_eps=None, gamma=0.9, lam=0.8, normalise="sample"),
        Critic(clip_eps=0.5, returns="given"),
        Critic(kl_coef=0.3, kl_estimator="k1", lam=0.9),
    ],
    ids=["clip", "plain", "given", "KL in reward"],
)
@given(samples=sample_lists(max_samples=7), seed=st.integers(0, 99))
def test_critic_equals_unfolded_samples_for_any_cut(objective, samples, seed):
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    alone = [[index] for index in range(len(samples))]
    loss_of = lambda cut: run_values(objective, world, cut)[0]  # noqa: E731
    check_cuts(critic_loss(objective, world), world.scalar, alone, seed, loss_of)


@pytest.mark.parametrize("center", [0.0, 0.01])
@given(samples=sample_lists(max_samples=8), seed=st.integers(0, 99))
def test_reward_model_equals_unfolded_pairs_for_any_cut(center, samples, seed):
    samples = samples[: len(samples) // 2 * 2]
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    objective, pairs = RewardModel(center_coef=center), [[index, index + 1] for index in range(0, len(samples), 2)]
    loss_of = lambda cut: run_values(objective, world, cut)[0]  # noqa: E731
    check_cuts(reward_model_loss(objective, world), world.scalar, pairs, seed, loss_of)


def test_metrics_of_a_reward_model():
    samples = [Sample(tokens=[1, 2, end], signals=Signals(pair=0, chosen=end == 3)) for end in (3, 4)]
    layout = fold(samples)
    values = torch.zeros(layout.padded_size)
    values[layout.sample_tokens(0)[-1]], values[layout.sample_tokens(1)[-1]] = 2.0, 0.5
    output = RewardModel().loss(values, None, RewardModel().targets(samples).rows(layout, [0, 1]))
    assert divided(output.metrics) == {"reward_chosen": 2.0, "reward_rejected": 0.5, "accuracy": 1.0, "margin": 1.5}
    assert output.loss.item() == pytest.approx(np.log1p(np.exp(-1.5)))


def test_metrics_of_a_critic_do_not_depend_on_the_cut():
    samples = [Sample(tokens=[1, 2, *[3] * n], source=f"file:{n}") for n in range(4)]
    world = World.of(with_signals(samples, 2, table_seed=2), 2)
    results = []
    for cut in ([[0, 1, 2, 3]], [[3], [], [0, 2, 1]]):
        _, outputs = run_values(Critic(), world, cut)
        results.append(divided(add_means(output.metrics for output in outputs)))
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    assert set(results[0]) == {"value", "return", "value_error", "clip_fraction"}


def test_missing_and_non_finite_fields_are_named():
    samples = with_signals([Sample(tokens=[1, 2, 3]), Sample(tokens=[1, 2, 4])], 0, table_seed=0)
    with pytest.raises(SampleError, match=r"^file:1: field 'values' is missing, and a critic needs it"):
        Critic().targets([samples[0], changed(samples[1], values=None)])
    with pytest.raises(SampleError, match=r"^file:1: field 'returns' is missing, and returns=given needs it"):
        Critic(returns="given").targets([samples[0], changed(samples[1], returns=None)])
    with pytest.raises(SampleError, match=r"^file:0: the partner of pair 0 is not in this step"):
        RewardModel().targets(samples[:1])
    layout = fold(samples)
    values = torch.zeros(layout.padded_size)
    values[layout.sample_tokens(1)[-1]] = float("nan")
    output = RewardModel().loss(values, None, RewardModel().targets(samples).rows(layout, [0, 1]))
    assert output.bad_sample == 1
