from __future__ import annotations

import random

import pytest
import torch
from harness.losses import divided
from harness.oracles import sample_lists
from hypothesis import given
from hypothesis import strategies as st
from objective_oracles import World, changed, random_cut, run_logprobs, scored_positions, token_weights, with_signals

from mcore_prefix_tree import Sample, SampleError, Signals
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.objectives.normalise import normalise
from mcore_prefix_tree.objectives.scored import ScoredTokens


@pytest.mark.parametrize(("by", "length"), [("token", None), ("sample", None), ("group", None), ("sample_sum", 5.0)])
@given(samples=sample_lists(max_samples=8), seed=st.integers(0, 99))
def test_loss_equals_unfolded_samples_for_any_cut(by, length, samples, seed):
    world = World.of(with_signals(samples, seed, table_seed=seed), seed)
    objective = make_objective("sft", {"normalise": by, "normalise_length": length})
    weights, divisor = token_weights(world.samples, by, length)
    expected = world.logits.sum() * 0
    for index, sample in enumerate(world.samples):
        own = world.logprobs(index)
        for t in scored_positions(sample):
            expected = expected - weights[index, t] * own[t] / divisor
    (wanted,) = torch.autograd.grad(expected, world.logits)
    for parts in (1, 4):
        cut = random_cut([[index] for index in range(len(samples))], parts, random.Random(seed))
        loss, _ = run_logprobs(objective, world, cut)
        (grad,) = torch.autograd.grad(loss, world.logits)
        assert abs(loss.item() - expected.item()) <= 1e-12 * max(1.0, abs(expected.item()))
        assert (grad - wanted).norm() <= 1e-12 * max(1e-3, wanted.norm())
    assert objective.targets(world.samples).divisor == divisor


def samples_of_groups():
    return [
        Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], signals=Signals(group="a")),
        Sample(tokens=[1, 2], loss_mask=[1, 0], signals=Signals(group="a")),  # nothing scored
        Sample(tokens=[1, 4], loss_mask=[0, 0.5], signals=Signals(group="b")),
        Sample(tokens=[1, 5, 6, 7], loss_mask=[0, 1, 0, 2], signals=Signals(group="a")),
    ]


@pytest.mark.parametrize(
    ("by", "weight", "count"),
    [
        ("token", [1, 1, 0.5, 1, 2], [2, 0, 1, 2]),
        ("sample", [1 / 2, 1 / 2, 0.5, 1 / 2, 1], [1, 0, 1, 1]),
        ("group", [1 / 4, 1 / 4, 0.5, 1 / 4, 1 / 2], [1, 0, 1, 0]),
        ("sample_sum", [1, 1, 0.5, 1, 2], [1, 0, 1, 1]),
    ],
)
def test_the_normaliser_by_hand(by, weight, count):
    normalised = normalise(ScoredTokens.of(samples_of_groups()), by)
    assert normalised.weight.tolist() == weight
    assert normalised.count.tolist() == count
    assert normalised.count.dtype == "int64"


def test_group_counts_if_its_first_sample_is_unscored():
    samples = samples_of_groups()[1:]
    assert normalise(ScoredTokens.of(samples), "group").count.sum() == 2


def test_scored_tokens_and_their_turns():
    scored = ScoredTokens.of(samples_of_groups())
    assert scored.position.tolist() == [1, 2, 1, 1, 3]
    assert scored.sample.tolist() == [0, 0, 2, 3, 3]
    assert scored.cu_lens.tolist() == [0, 2, 2, 3, 5]
    assert scored.turn.tolist() == [0, 0, 0, 0, 1]
    assert len(ScoredTokens.of([])) == 0
    assert ScoredTokens.of([]).turn.tolist() == []


def test_a_sample_without_a_group_is_named():
    samples = [changed(sample, group=None) for sample in samples_of_groups()]
    with pytest.raises(SampleError, match="sample: field 'group' is missing, and normalise=group needs it"):
        normalise(ScoredTokens.of(samples), "group")


def test_metrics():
    world = World.of(samples_of_groups(), 0)
    _, outputs = run_logprobs(make_objective("sft"), world, [[0, 1, 2, 3]])
    own = [world.logprobs(i)[t] for i, sample in enumerate(world.samples) for t in scored_positions(sample)]
    assert divided(outputs[0].metrics)["nll"] == pytest.approx(-sum(x.item() for x in own) / 5)
