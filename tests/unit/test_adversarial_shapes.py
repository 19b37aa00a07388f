"""All host-side work on adversarial shapes (sorting, planning, layout and tensors) takes seconds."""

from __future__ import annotations

import numpy as np
import pytest
from harness.speed import linear_time

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.logprob import Edges
from mcore_prefix_tree.plan import CostModel, least_makespan, plan_step, report_plan
from mcore_prefix_tree.plan.balance import balance
from mcore_prefix_tree.plan.pack import Leaves
from mcore_prefix_tree.trie import build_trie, trie_from_order

MODEL = CostModel(token=1000.0, pair=1.0)


def sample(tokens):
    return Sample(tokens=np.asarray(tokens, dtype=np.int32))


def comb(depth):
    """Each sample goes further than the one before and then turns off; a tooth every 500 tokens, ten million in all."""
    trunk = np.arange(depth, dtype=np.int32)
    return [sample(np.append(trunk[:length], depth + 1)) for length in range(500, depth + 1, 500)]


def star(leaves):
    return [sample([1, 2, 3, 10 + leaf]) for leaf in range(leaves)]


def equal(count):
    return [sample(np.arange(20))] * count


def lone(count):
    return [sample([leaf, 1, 2]) for leaf in range(count)]


def staircase(count):
    """Every sample is a strict prefix of the next: one path, as many nodes as samples."""
    return [sample(np.zeros(length)) for length in range(1, count + 1)]


SHAPES = {
    "comb": (lambda: comb(100_000), 100_001, 100_000 + 200),
    "star": (lambda: star(50_000), 10_000, 3 + 50_000),
    "equal": (lambda: equal(50_000), 20, 20),
    "lone": (lambda: lone(100_000), 20_000, 300_000),
    "staircase": (lambda: staircase(4_000), 4_000, 4_000),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "dp_size"),
    [
        ("comb", 1),
        ("star", 16),
        ("equal", 1),
        ("staircase", 16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("comb", 16), ("star", 1), ("equal", 16), ("lone", 1), ("lone", 16), ("staircase", 1))
        ),
    ],
)
def test_in_time(shape, dp_size):
    make, longest, unique = SHAPES[shape]
    samples = make()
    max_tokens = longest + 10

    scored = 0
    with linear_time():
        plan = plan_step(samples, max_tokens=max_tokens, dp_size=dp_size, cost_model=MODEL)
        for rank in plan.micro_batches:
            for batch in rank:
                own = [samples[index] for index in batch]
                layout = fold(own, trie=build_trie(own))
                metadata = TreeMetadata.from_layout(layout)
                edges = Edges.from_layout(layout)
                assert metadata.padded_size == layout.padded_size
                assert edges is not None
                assert layout.physical_tokens <= max_tokens
                scored += layout.num_samples
    assert scored == len(samples)

    with linear_time():
        report = report_plan(samples, plan, MODEL, max_tokens=max_tokens)
    assert report.unique_tokens == unique
    assert report.over_lower_bound >= 1 - 1e-9


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
