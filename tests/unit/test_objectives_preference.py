from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from harness.losses import divided
from harness.oracles import sample_lists
from hypothesis import assume, given
from hypothesis import strategies as st
from objective_oracles import (
    World,
    changed,
    check_cuts,
    kto_loss,
    pair_loss,
    random_cut,
    run_logprobs,
    scored_positions,
    with_signals,
)

from mcore_prefix_tree import Sample, SampleError, fold
from mcore_prefix_tree.logprob.softmax import log1mexp
from mcore_prefix_tree.objectives import KTO, make_objective
from mcore_prefix_tree.objectives.metrics import add_means


def all_scored(sample: Sample) -> Sample:
    """With at least one token scored, as a completion has."""
    tokens = np.concatenate([sample.tokens, [1]])
    return Sample(tokens=tokens, loss_mask=[*sample.loss_mask, 0.25], merge_key=sample.merge_key)


SETTINGS = [
    ("dpo", {}),
    ("dpo", {"label_smoothing": 0.1, "nll_coef": 0.5, "beta": 0.5}),
    ("dpo", {"link": "hinge"}),
    ("ipo", {}),
    ("simpo", {}),
    ("orpo", {}),
]


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=[f"{name}{i}" for i, (name, _) in enumerate(SETTINGS)])
@given(samples=sample_lists(max_samples=8), seed=st.integers(0, 99))
def test_loss_equals_unfolded_pairs_for_any_cut(name, options, samples, seed):
    samples = [all_scored(sample) for sample in samples[: len(samples) // 2 * 2]]
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    objective = make_objective(name, options)
    pairs = [[index, index + 1] for index in range(0, len(samples), 2)]
    loss_of = lambda cut: run_logprobs(objective, world, cut)[0]  # noqa: E731
    check_cuts(pair_loss(objective, world), world.logits, pairs, seed, loss_of)


@pytest.mark.parametrize("point", ["mismatched", "zero"])
@given(samples=sample_lists(max_samples=7, min_samples=2), seed=st.integers(0, 99))
def test_kto_equals_unfolded_samples_for_any_cut(point, samples, seed):
    samples = [sample for sample in samples if scored_positions(sample)]
    assume(samples)
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    objective = KTO(reference_point=point, desirable_weight=1.3, undesirable_weight=0.7, beta=0.4)
    expected = kto_loss(objective, world)
    (wanted,) = torch.autograd.grad(expected, world.logits)
    for parts in (1, 3):
        cut = random_cut([[index] for index in range(len(samples))], parts, random.Random(seed))
        loss, _ = run_logprobs(objective, world, cut)
        (grad,) = torch.autograd.grad(loss, world.logits)
        assert abs(loss.item() - expected.item()) <= 1e-12
        assert (grad - wanted).norm() <= 1e-12 * max(1e-3, wanted.norm())


def some_pairs():
    samples = [Sample(tokens=[1, 2, *[7] * line], loss_mask=[0, 0, *[1] * line]) for line in range(1, 5)]
    return with_signals(samples, 1, table_seed=1)


def test_metrics_by_hand():
    world = World.of(some_pairs(), 1)
    _, outputs = run_logprobs(make_objective("dpo"), world, [[0, 1], [3, 2]])
    metrics = divided(add_means(output.metrics for output in outputs))
    score = []
    for index, sample in enumerate(world.samples):
        own = world.logprobs(index)
        score.append(sum(own[t].item() - sample.signals.ref_logprobs[t] for t in scored_positions(sample)))
    margins = [0.1 * (score[1] - score[0]), 0.1 * (score[3] - score[2])]
    assert metrics["margin"] == pytest.approx(sum(margins) / 2)
    assert metrics["accuracy"] == sum(m > 0 for m in margins) / 2
    assert metrics["reward_chosen"] == pytest.approx(0.1 * (score[1] + score[3]) / 2)
    assert metrics["reward_rejected"] == pytest.approx(0.1 * (score[0] + score[2]) / 2)


UNSCORED = [Sample(tokens=[1, 2]), Sample(tokens=[1, 2], loss_mask=[1, 0])]


@pytest.mark.parametrize(
    ("objective", "change", "says"),
    [
        ("dpo", lambda s: s[:3], r"^file:2: the partner of pair 1 is not in this step"),
        ("dpo", lambda s: [s[0], changed(s[1], pair=None, chosen=None)],
         r"^file:1: field 'pair' is missing, and a preference"),
        ("dpo", lambda s: [s[0], s[1], changed(s[3], pair=0)],
         r"^file:3: pair 0 already has a chosen sample, file:1"),
        ("dpo", lambda s: [s[0], changed(s[1], ref_logprobs=None)], r"^file:1: field 'ref_logprobs' is missing"),
        ("simpo", lambda s: with_signals(UNSCORED, 0, table_seed=0), r"^file:1: no token is scored"),
        (KTO(reference_point="zero"), lambda s: with_signals(UNSCORED, 0, table_seed=0),
         r"^file:1: no token is scored, and kto scores completions"),
        (KTO(), lambda s: [s[0], changed(s[1], label=None)], r"^file:1: field 'label' is missing, and kto needs it"),
        (KTO(), lambda s: [changed(s[0], old_logprobs=None), s[1]],
         r"^file:0: field 'old_logprobs' is missing, and a mismatched sample needs it"),
        (KTO(), lambda s: s[1:], r"^file:1: neither this nor another sample of the step is mismatched"),
    ],
)  # fmt: skip
def test_samples_that_do_not_fit_are_named(objective, change, says):
    with pytest.raises(SampleError, match=says):
        (make_objective(objective) if isinstance(objective, str) else objective).targets(change(some_pairs()))


def test_a_pair_cut_in_two_is_refused():
    samples = some_pairs()
    targets = make_objective("dpo").targets(samples)
    with pytest.raises(ValueError, match=r"file:3 and file:2 are the two sides of a pair but not in one micro-batch"):
        targets.rows(fold(samples[:3]), [0, 1, 2])
    assert make_objective("dpo").together(samples) == [0, 0, 1, 1]
    assert KTO().together(samples) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"link": "odds_ratio"}, "link=odds_ratio takes probabilities"),
        ({"link": "ipo", "gamma": 1.0}, r"gamma=1\.0 has no effect without link=sigmoid; remove it"),
        ({"beta": 0.0}, "beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
    ],
)
def test_invalid_settings_are_rejected(options, says):
    with pytest.raises(ValueError, match=says):
        make_objective("dpo", options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_keeps_its_digits(dtype):
    x = -torch.logspace(-12, 1.9, 200, dtype=torch.float64)
    values = x.to(dtype).requires_grad_()
    result = log1mexp(values)
    (grad,) = torch.autograd.grad(result.sum(), values)
    for value, got, slope in zip(values.tolist(), result.tolist(), grad.tolist(), strict=True):
        exact = math.log(-math.expm1(value)) if value > -0.7 else math.log1p(-math.exp(value))
        eps = torch.finfo(dtype).eps
        assert got == pytest.approx(exact, rel=4 * eps)
        assert slope == pytest.approx(math.exp(value) / math.expm1(value), rel=8 * eps)
    at_zero = torch.tensor([0.0, 1e-3], dtype=dtype, requires_grad=True)
    assert torch.isfinite(log1mexp(at_zero)).all()
    assert torch.isfinite(torch.autograd.grad(log1mexp(at_zero).sum(), at_zero)[0]).all()
