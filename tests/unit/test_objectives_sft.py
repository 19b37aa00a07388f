from __future__ import annotations

import pytest
from harness.losses import divided
from harness.oracles import sample_lists
from hypothesis import given
from hypothesis import strategies as st
from objective_oracles import (
    World,
    changed,
    check_cuts,
    run_logprobs,
    scored_positions,
    token_weights,
    with_signals,
)

from mcore_prefix_tree import Sample, SampleError, Signals
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.objectives.scored import ScoredTokens, normalise


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
    alone = [[index] for index in range(len(samples))]
    check_cuts(expected, world.logits, alone, seed, lambda cut: run_logprobs(objective, world, cut)[0])
    assert objective.targets(world.samples).divisor == divisor


def samples_of_groups():
    return [
        Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], signals=Signals(group="a")),
        Sample(tokens=[1, 2], loss_mask=[1, 0], signals=Signals(group="a")),  # nothing scored
        Sample(tokens=[1, 4], loss_mask=[0, 0.5], signals=Signals(group="b")),
        Sample(tokens=[1, 5, 6, 7], loss_mask=[0, 1, 0, 2], signals=Signals(group="a")),
    ]


def test_a_sample_without_a_group_is_named():
    samples = [changed(sample, group=None) for sample in samples_of_groups()]
    with pytest.raises(SampleError, match="sample: field 'group' is missing, and normalise=group needs it"):
        normalise(ScoredTokens.of(samples), "group")


def test_metrics():
    world = World.of(samples_of_groups(), 0)
    _, outputs = run_logprobs(make_objective("sft"), world, [[0, 1, 2, 3]])
    own = [world.logprobs(i)[t] for i, sample in enumerate(world.samples) for t in scored_positions(sample)]
    assert divided(outputs[0].metrics)["nll"] == pytest.approx(-sum(x.item() for x in own) / 5)
