from __future__ import annotations

import math

import numpy as np
import pytest
from harness.oracles import sample_lists
from hypothesis import given

from mcore_prefix_tree import fold
from mcore_prefix_tree.plan import CostModel, Measured, ModelWork
from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN
from mcore_prefix_tree.trie import build_trie


def test_costs_are_the_flops_of_forward_and_backward():
    dimensions = {"num_layers": 3, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 4, "vocab_size": 100}
    settings = {"window_size": (4, 0), "window_attn_skip_freq": 3}
    for fused_head in (False, True):
        work = ModelWork.from_dimensions(**dimensions, fused_head=fused_head, settings=settings)
        head = 3 * work.position
        cost = CostModel.from_work(work)
        assert cost.token == 3 * work.token + (0 if fused_head else head)
        assert cost.scored == (head if fused_head else 0)
        assert cost.pair == 3 * work.pair.total, "a window is not planned with"
        assert (cost.segment, cost.level, cost.micro_batch) == (0, 0, 0)
    hybrid = ModelWork.from_dimensions(**dimensions, pattern="G-M")
    assert CostModel.from_work(hybrid).segment == 32 * 3 * hybrid.unused > 0, "half a chunk"
    indexer = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 3, "dsa_indexer_topk": 5}
    sparse = ModelWork.from_dimensions(**dimensions, settings=indexer, pattern="D-")
    cost = CostModel.from_work(sparse)
    assert cost.pair == sparse.indexer_pair.total == 2 * 2 * 3
    own = sparse.indexer_token.total + 5 * sparse.pair.total
    assert cost.token == 3 * (sparse.token + sparse.position) + own, "every token attends to top-k keys"


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ({"pair": -1.0}, r"CostModel.pair=-1.0 must be finite and >= 0"),
        ({"micro_batch": math.inf}, "CostModel.micro_batch=inf must be finite"),
        ({"token": 0.0}, "a token has to cost something"),
    ],
)
def test_impossible_costs_are_refused(costs, says):
    with pytest.raises(ValueError, match=says):
        CostModel(**costs)


@given(sample_lists())
def test_paths_add_up_to_the_layout(samples):
    """Cost of every node's token run by path lengths, against tokens and visible pairs of the layout."""
    model = CostModel(token=3.0, pair=0.25, scored=2.0, micro_batch=7.0)
    trie, layout = build_trie(samples), fold(samples)
    ends = trie.node_depth + np.diff(trie.cu_node_lens)
    total = float((model.of_path(ends) - model.of_path(trie.node_depth)).sum())
    assert total + 7.0 == model.of_micro_batch(layout.physical_tokens, layout.visible_pairs)
    scaled = [round(cost * UNITS_PER_TOKEN / 3) for cost in model.of_path(ends).tolist()]
    assert np.abs(model.units_of_path(ends) - scaled).max(initial=0) <= 1
    assert model.units_of_micro_batch == round(7 * UNITS_PER_TOKEN / 3)
    assert model.units_of_scored(np.array([0, 1, 6])).tolist() == [0, 683, 4096]
    assert model.of_micro_batch(5, 8, 3) == 15 + 2 + 6 + 7


def measured(model, shapes, noise=()):
    noise = noise or [1.0] * len(shapes)
    return [Measured(t, p, model.of_micro_batch(t, p, *s) * f, *s) for (t, p, *s), f in zip(shapes, noise, strict=True)]


SHAPES = [(1000, 50_000), (1000, 900_000), (8000, 900_000), (64_000, 90_000_000), (300, 4000)]


def test_calibration_recovers_the_cost_model():
    truth = CostModel(token=2e-6, pair=3e-11, micro_batch=4e-3)
    found = CostModel(token=5.0, pair=1.0).calibrated(measured(truth, SHAPES))
    for name in ("token", "pair", "micro_batch"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6)


def test_calibration_recovers_the_scoring_cost():
    truth = CostModel(token=2e-6, pair=3e-11, scored=7e-6, micro_batch=4e-3)
    shapes = [(*shape, scored) for shape, scored in zip(SHAPES, (900, 10, 3000, 100, 299), strict=True)]
    found = CostModel(token=5.0, pair=1.0).calibrated(measured(truth, shapes))
    assert vars(found) == pytest.approx(vars(truth), rel=1e-6)
    # Recurrent layers: segments and levels.
    truth = CostModel(token=2e-6, pair=3e-11, scored=7e-6, segment=5e-5, level=3e-3, micro_batch=4e-3)
    branches = [(20, 3), (1, 1), (300, 8), (90, 40), (9, 9), (65, 33), (32, 1)]
    shapes = [(*one, *two) for one, two in zip([*shapes, (500, 9000, 499), (800, 9000, 1)], branches, strict=True)]
    assert vars(CostModel().calibrated(measured(truth, shapes))) == pytest.approx(vars(truth), rel=1e-5)
    # From too few, the costs keep their proportions.
    given = CostModel(token=2.0, pair=1e-3, scored=7.0)
    found = given.calibrated(measured(CostModel(token=2e-6, pair=1e-9, scored=7e-6), shapes[:3]))
    assert vars(found) == pytest.approx(vars(CostModel(token=2e-6, pair=1e-9, scored=7e-6)))


def test_calibrated_costs_are_never_negative():
    """Large micro-batches a little slow and small ones fast: plain least squares would give a negative overhead."""
    truth = CostModel(token=2e-6, pair=3e-11)
    found = CostModel(token=5.0).calibrated(measured(truth, SHAPES, [1.0, 1.0, 1.05, 1.1, 0.8]))
    assert found.micro_batch == 0
    assert found.token == pytest.approx(2e-6, rel=0.3)


@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES[:2], [(1000, 5000), (2000, 10_000), (1000, 5000)]])
def test_too_few_measurements_only_scale(shapes):
    model = CostModel(token=10.0, pair=0.5)
    found = model.calibrated(measured(CostModel(token=2e-6, pair=1e-7), shapes))
    assert found.token == pytest.approx(2e-6)
    assert found.pair == pytest.approx(1e-7)


def test_nothing_measured():
    with pytest.raises(ValueError, match="calibration needs measurements"):
        CostModel().calibrated([])
    with pytest.raises(ValueError, match="positive tokens, pairs and seconds"):
        CostModel().calibrated([Measured(5, 15, 0.0)])
