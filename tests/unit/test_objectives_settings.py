from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from harness.losses import divided

from mcore_prefix_tree import Sample, Signals, fold
from mcore_prefix_tree.objectives import make_objective


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sft", {"normalise_length": 50}, "normalise_length=50.0 has no effect without normalise=sample_sum; remove"),
        ("rloo", {"dual_clip": 3}, "dual_clip=3.0 has no effect without surrogate=clip; remove it"),
        ("dpo", {"link": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 has no effect without link=sigmoid"),
        ("critic", {"returns": "given", "gamma": 0.9}, "gamma=0.9 has no effect without returns=gae; remove it"),
        ("critic", {"returns": "given", "lam": 0.9}, "lam=0.9 has no effect without returns=gae; remove it"),
        ("critic", {"returns": "given", "kl_coef": 0.1}, "kl_coef=0.1 has no effect without returns=gae; remove it"),
        ("distill", {"jsd_beta": 0.2}, "jsd_beta=0.2 has no effect without divergence=jsd; remove it"),
    ],
)
def test_settings_without_effect_are_rejected(name, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make_objective(name, options)


def test_kl_penalty_on_rewards_pulls_towards_the_reference():
    """Over all tokens that could be drawn, the penalty's gradient is that of KL(pi || ref)."""
    logits, ref = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    log_pi, log_ref = torch.log_softmax(logits, 0), torch.log_softmax(ref, 0)
    (wanted,) = torch.autograd.grad((log_pi.exp() * (log_pi - log_ref)).sum(), logits, retain_graph=True)
    samples = [
        Sample(
            tokens=[9, token],
            loss_mask=[0, math.exp(old)],
            signals=Signals(reward=0.0, old_logprobs=[np.nan, old], ref_logprobs=[np.nan, ref]),
        )
        for token, (old, ref) in enumerate(zip(log_pi.tolist(), log_ref.tolist(), strict=True))
    ]
    layout = fold(samples)

    def gradient(**options):
        objective = make_objective("reinforce", {"kl_in": "reward", "kl_coef": 1.0, **options})
        flat = torch.zeros(layout.padded_size, dtype=torch.float64)
        at = torch.tensor([int(layout.sample_tokens(index)[1]) for index in range(6)])
        targets = objective.targets(samples)
        loss = objective.loss(flat.index_put((at,), log_pi), None, targets.rows(layout, range(6))).loss
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    assert torch.allclose(gradient(), wanted, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(gradient(kl_estimator="k3"), wanted, rtol=0.1, atol=1e-2)
    policy, critic = make_objective("ppo", {"kl_in": "reward"}), make_objective("critic", {"kl_coef": 0.1})
    assert policy.estimator == critic.kl_estimator


def three_tokens(reward: float, group: str, rollout: list[float]) -> Sample:
    """Engine's log-probabilities 0.5 off in the second of three tokens, whose mask is a quarter."""
    return Sample(
        tokens=[1, 2, 3, int(reward)],
        loss_mask=[0, 1.0, 0.25, 1.0],
        signals=Signals(
            reward=reward, group=group, old_logprobs=[np.nan, -1.0, -1.0, -1.0], rollout_logprobs=[np.nan, *rollout]
        ),
    )


def loss_of(objective, samples, moved: list[float]):
    """Each sample's tokens, by how far the policy has moved since ``old_logprobs``."""
    layout = fold(samples)
    logprob = torch.zeros(layout.padded_size, dtype=torch.float64)
    for index in range(len(samples)):
        logprob[layout.sample_tokens(index)[1:]] = torch.tensor(moved, dtype=torch.float64) - 1.0
    logprob.requires_grad_()
    return objective.loss(logprob, None, objective.targets(samples).rows(layout, range(len(samples)))), logprob


def test_a_sequence_ratio_weighs_tokens_by_their_mask():
    samples = [three_tokens(reward, "g", [-1.0] * 3) for reward in (5.0, 7.0)]
    output, _ = loss_of(make_objective("gspo"), samples, [0.0, 0.9, 0.0])
    assert divided(output.metrics)["ratio"] == pytest.approx(math.exp(0.25 * 0.9 / 2.25))


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"tis_cap": 1.5}, [1, 1.5, math.exp(-0.5)]),
        ({"tis_cap": 1.5, "tis_floor": 0.8}, [1, 1.5, 0.8]),
        ({"tis_cap": 1.5, "tis_floor": 0.8, "tis_mode": "mask"}, [1, 0, 0]),
        ({"tis_cap": 1.7, "tis_floor": 0.6, "tis_mode": "mask"}, [1, math.exp(0.5), math.exp(-0.5)]),
        ({"tis_cap": 1.5, "tis_level": "sequence"}, [1, 1, 1]),
    ],
)
def test_weights_of_engine_samples(options, weights):
    samples = [three_tokens(reward, "g", [-1.0, -1.5, -0.5]) for reward in (5.0, 7.0)]
    objective = make_objective("reinforce", {**options, "advantage": "given"})
    samples = [
        Sample(tokens=s.tokens, loss_mask=[0, 1, 1, 1], signals=Signals(**{**vars(s.signals), "advantage": 1.0}))
        for s in samples
    ]
    output, logprob = loss_of(objective, samples, [0.0] * 3)
    (grad,) = torch.autograd.grad(output.loss, logprob)
    layout = fold(samples)
    own = -grad[layout.sample_tokens(0)[1:]]
    # The first two tokens are both samples'.
    assert own.tolist() == pytest.approx([2 * weights[0], 2 * weights[1], weights[2]])
    assert divided(output.metrics)["tis_weight"] == pytest.approx(sum(weights) / 3)


def test_far_off_policy_samples_with_negative_advantage_are_masked():
    samples = [three_tokens(reward, "g", [-1.0] * 3) for reward in (5.0, 7.0)]  # advantages of -0.7 and 0.7
    objective = make_objective("grpo", {"off_policy_mask": 0.1})
    near, logprob = loss_of(objective, samples, [-0.1, -0.1, 0.0])
    assert divided(near.metrics)["off_policy_masked"] == 0
    far, logprob = loss_of(objective, samples, [-0.2, -0.2, 0.0])  # by 0.25 / 2.25
    assert divided(far.metrics)["off_policy_masked"] == pytest.approx(1 / 2)
    (grad,) = torch.autograd.grad(far.loss, logprob)
    layout = fold(samples)
    assert grad[layout.sample_tokens(0)[3]] == 0
    assert grad[layout.sample_tokens(1)[1:]].all()
