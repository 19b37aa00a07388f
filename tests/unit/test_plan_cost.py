from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from oracles import sample_lists

from mcore_prefix_tree import fold
from mcore_prefix_tree.plan import CostModel, LatentAttention, Measured
from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN
from mcore_prefix_tree.recipe import ModelConfig
from mcore_prefix_tree.trie import build_trie

SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": 100}


def test_flops_by_hand():
    """Head size 2. A layer: q and out 8 x 8 each, k and v 8 x 4 each, three of 8 x 16. The head: 8 x 100."""
    model = CostModel.from_dimensions(**SMALL, num_query_groups=2, ffn_hidden_size=16)
    weights = 2 * (2 * 64 + 2 * 32 + 3 * 128) + 800
    assert model.token == 3 * 2 * weights
    # Scores and values: 2 FLOPs x 2 channels x 4 heads x 2 layers each; the backward 2.5 times the forward.
    assert model.pair == 3.5 * 2 * (2 * 2 * 4 * 2)
    assert model.micro_batch == model.scored == 0
    fused = CostModel.from_dimensions(**SMALL, num_query_groups=2, ffn_hidden_size=16, fused_head=True)
    assert (fused.token, fused.scored, fused.pair) == (model.token - 3 * 2 * 800, 3 * 2 * 800, model.pair)


def test_flops_of_latent_attention_by_hand():
    """Four heads, whose queries and keys have 3 channels without a position and 2 with one, and whose values have 5."""
    latent = LatentAttention(q_lora_rank=6, kv_lora_rank=7, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=5)
    queries = 8 * 6 + 6 * (4 * (3 + 2))
    keys_values = 8 * (7 + 2) + 7 * (4 * (3 + 5))
    layer = queries + keys_values + (4 * 5) * 8 + 3 * 8 * 16
    model = CostModel.from_dimensions(**SMALL, ffn_hidden_size=16, latent=latent)
    assert model.token == 3 * 2 * (2 * layer + 800)
    # Scores of 5 channels three times in the backward, and those of values twice.
    assert model.pair == 2 * 2 * 4 * ((5 + 5) + (3 * 5 + 2 * 5))
    whole = replace(latent, q_lora_rank=None)
    assert whole.weights(8, 4) == latent.weights(8, 4) - queries + 8 * (4 * 5)

    settings = {"multi_latent_attention": True, **vars(latent), "rope_type": "rope"}
    recipe = ModelConfig(**SMALL, ffn_hidden_size=16, transformer=settings)
    assert CostModel.from_model(recipe) == model
    assert LatentAttention.from_settings({"multi_latent_attention": True}) == LatentAttention()
    assert LatentAttention.from_settings(settings | {"multi_latent_attention": False}) is None


def test_a_recipe_s_model():
    dense = ModelConfig(**SMALL, num_query_groups=2, ffn_hidden_size=16)
    assert CostModel.from_model(dense) == CostModel.from_dimensions(**SMALL, num_query_groups=2, ffn_hidden_size=16)
    plain = ModelConfig(**SMALL, swiglu=False, kv_channels=5)
    assert CostModel.from_model(plain) == CostModel.from_dimensions(
        **SMALL, ffn_hidden_size=32, swiglu=False, kv_channels=5
    )
    experts = {"num_moe_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 6}
    experts["moe_shared_expert_intermediate_size"] = 4
    moe = ModelConfig(**SMALL, ffn_hidden_size=16, transformer=experts)
    assert CostModel.from_model(moe) == CostModel.from_dimensions(**SMALL, ffn_hidden_size=3 * 6 + 4)
    unknown = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=4, ffn_hidden_size=16)
    with pytest.raises(ValueError, match=r"model\.vocab_size"):
        CostModel.from_model(unknown)
    assert CostModel.from_model(unknown, vocab_size=100) == CostModel.from_dimensions(**SMALL, ffn_hidden_size=16)
    no_head = CostModel.from_dimensions(**SMALL | {"vocab_size": 0}, ffn_hidden_size=16)
    for fused_head in (False, True):
        assert CostModel.from_model(unknown, fused_head=fused_head, scalar_head=True) == no_head


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


def test_calibration_finds_what_made_the_times():
    truth = CostModel(token=2e-6, pair=3e-11, micro_batch=4e-3)
    found = CostModel(token=5.0, pair=1.0).calibrated(measured(truth, SHAPES))
    for name in ("token", "pair", "micro_batch"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6)


def test_calibration_finds_what_scoring_costs():
    truth = CostModel(token=2e-6, pair=3e-11, scored=7e-6, micro_batch=4e-3)
    shapes = [(*shape, scored) for shape, scored in zip(SHAPES, (900, 10, 3000, 100, 299), strict=True)]
    found = CostModel(token=5.0, pair=1.0).calibrated(measured(truth, shapes))
    assert vars(found) == pytest.approx(vars(truth), rel=1e-6)
    # From too few, the costs keep their proportions.
    given = CostModel(token=2.0, pair=1e-3, scored=7.0)
    found = given.calibrated(measured(CostModel(token=2e-6, pair=1e-9, scored=7e-6), shapes[:3]))
    assert vars(found) == pytest.approx({"token": 2e-6, "pair": 1e-9, "scored": 7e-6, "micro_batch": 0})


def test_calibration_never_goes_below_zero():
    """Large micro-batches a little slow and small ones fast: least squares alone would give a negative overhead."""
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
