"""Planning and metadata of an adversarial shape take seconds."""

from __future__ import annotations

import numpy as np
import pytest
from harness.speed import linear_time

from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.plan import CostModel, least_makespan
from mcore_prefix_tree.plan.balance import balance
from mcore_prefix_tree.plan.pack import Leaves
from mcore_prefix_tree.trie import trie_from_order

MODEL = CostModel(token=1000.0, pair=1.0)


@pytest.mark.parametrize("dp_size", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_comb_of_100_000_nodes_in_depth(dp_size):
    """Has five billion tokens; planning reads only their lengths."""
    count = 100_000
    shared, lengths = np.arange(count), np.arange(count) + 2
    with linear_time():
        trie = trie_from_order(np.arange(count), shared, lengths)
        assert trie.num_nodes == 2 * count - 1  # nothing turns off from the last token but one
        leaves = Leaves.of_samples(shared, lengths)
        options = {"dp_size": dp_size, "micro_batches": 2, "max_tokens": 150_000}
        ranks = balance(leaves, MODEL, **options)
        held = np.concatenate([chosen for rank in ranks for chosen in rank])
        assert np.array_equal(np.sort(held), np.arange(count))
        slowest = max(sum(leaves.some(chosen).units(MODEL) for chosen in rank) for rank in ranks)
        assert least_makespan(trie, MODEL, **options) <= slowest
        metadata = TreeMetadata.from_nodes(trie.cu_node_lens, trie.node_parent)
        assert metadata.max_path_len == count + 1
