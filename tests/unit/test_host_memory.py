"""Allocations of the host's work on top of its input, counted by tracemalloc."""

from __future__ import annotations

import tracemalloc

import numpy as np

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.plan import CostModel, plan_step
from mcore_prefix_tree.trie import build_trie


def peak_bytes(run):
    run()  # caches and lazy imports are not its memory
    tracemalloc.start()
    try:
        result = run()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def conversations(count, turns, length):
    """One sample per turn, each with its complete history."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        tokens = rng.integers(0, 30_000, turns * length)
        samples += [Sample(tokens=tokens[: (turn + 1) * length]) for turn in range(turns)]
    return samples


def test_the_per_turn_view_takes_four_bytes_a_logical_token():
    samples = conversations(40, 24, 100)
    logical = sum(map(len, samples))

    def everything():
        plan = plan_step(samples, max_tokens=8192, dp_size=4, cost_model=CostModel(token=1000.0, pair=1.0))
        layouts = [fold([samples[i] for i in batch]) for rank in plan.micro_batches for batch in rank]
        return plan, [TreeMetadata.from_layout(layout).segments for layout in layouts], layouts

    peak, (_, _, layouts) = peak_bytes(everything)
    assert logical > 1e6
    nodes = sum(layout.num_nodes for layout in layouts)
    assert peak <= 4 * logical + 150 * (nodes + len(samples))
    assert sum(layout.physical_tokens for layout in layouts) < logical / 10


def test_memory_without_sharing_is_the_layouts():
    """Four arrays of 4 bytes per token and one of 8 stay; no other array as long is alive with all of them."""
    rng = np.random.default_rng(1)
    samples = [Sample(tokens=rng.integers(0, 30_000, 5000)) for _ in range(100)]
    tokens = 100 * 5000
    peak, trie = peak_bytes(lambda: build_trie(samples))
    assert peak <= 4 * tokens + 400 * len(samples)
    peak, layout = peak_bytes(lambda: fold(samples, trie=trie))
    assert layout.physical_tokens == tokens
    assert 24 * tokens <= peak <= 24 * tokens + 2000 * len(samples)

    def everything():
        plan = plan_step(samples, max_tokens=100_000, dp_size=2, cost_model=CostModel(token=1000.0, pair=1.0))
        layouts = [fold([samples[i] for i in batch]) for rank in plan.micro_batches for batch in rank]
        return [(layout, TreeMetadata.from_layout(layout).segments) for layout in layouts]

    peak, layouts = peak_bytes(everything)
    assert sum(layout.physical_tokens for layout, _ in layouts) == tokens
    assert peak <= 24 * tokens + 2000 * len(samples) + 4 * 100_000  # the last sort overlaps the other micro-batches
