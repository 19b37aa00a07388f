from __future__ import annotations

import math

import numpy as np
import pytest
from harness.oracles import sample_lists
from hypothesis import given

from mcore_prefix_tree import fold
from mcore_prefix_tree.plan import CostModel, ModelWork
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
