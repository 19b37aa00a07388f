from __future__ import annotations

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from harness.oracles import metadata_of, random_forest, sample_lists
from harness.speed import linear_time
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, TreeMetadata, fold

forests = st.tuples(st.integers(0, 10_000), st.integers(0, 25), st.sampled_from([(1, 2, 5), (0, 1, 3), (0,)]))


def naive(node_lens, node_parent, padding):
    """Positions and subtree ends token by token, climbing from every node."""
    ancestors = []
    for node, parent in enumerate(node_parent):
        ancestors.append([node] + (ancestors[parent] if parent >= 0 else []))
    node_of = [node for node, length in enumerate(node_lens) for _ in range(length)]
    starts = np.concatenate([[0], np.cumsum(node_lens)])
    positions, ends = [], []
    for flat, node in enumerate(node_of):
        positions.append(flat - starts[node] + sum(node_lens[above] for above in ancestors[node][1:]))
        below = [other for other in range(flat, len(node_of)) if node in ancestors[node_of[other]]]
        ends.append(below[-1] + 1)
    tail = range(len(node_of), len(node_of) + padding)
    return positions + [0] * padding, ends + [flat + 1 for flat in tail]


@given(sample_lists(), st.integers(0, 5))
def test_from_layout_and_from_nodes_agree(samples, padding):
    layout = fold(samples, padded_size=max(1, sum(map(len, samples)) + padding))
    one = TreeMetadata.from_layout(layout)
    other = TreeMetadata.from_nodes(layout.cu_node_lens, layout.node_parent, padded_size=layout.padded_size)
    for name in ("cu_node_lens", "node_parent", "node_depth"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype == np.int32
    for name in ("tree_position_ids", "subtree_end"):
        assert torch.equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype == torch.int32
    assert (one.padded_size, one.max_path_len) == (other.padded_size, other.max_path_len)
    assert (one.num_nodes, one.num_tokens) == (layout.num_nodes, layout.physical_tokens)


@given(forests, st.integers(1, 4))
def test_from_nodes_against_climbing_every_path(forest, padding):
    seed, nodes, lens = forest
    node_lens, node_parent = random_forest(seed, nodes=nodes, node_lens=lens, root_rate=0.2)
    metadata = metadata_of(node_lens, node_parent, padding=padding)
    positions, ends = naive(node_lens, node_parent, padding)
    assert metadata.tree_position_ids.tolist() == positions
    assert metadata.subtree_end.tolist() == ends
    assert metadata.max_path_len == max(positions) + 1
    assert metadata.num_tokens == sum(node_lens)
    assert metadata.padded_size == sum(node_lens) + padding


@given(forests, st.integers(1, 3))
def test_segments_are_maximal_chains(forest, padding):
    seed, nodes, lens = forest
    node_lens, node_parent = random_forest(seed, nodes=nodes, node_lens=lens, root_rate=0.2)
    chains: list[list[int]] = []
    chain_of: dict[int, int] = {}
    for node, parent in enumerate(node_parent):
        if parent >= 0 and node_parent.count(parent) == 1:
            chain_of[node] = chain_of[parent]
            chains[chain_of[node]].append(node)
        else:
            chain_of[node] = len(chains)
            chains.append([node])
    metadata = metadata_of(node_lens, node_parent, padding=padding)
    segments = metadata.segments
    lengths = [sum(node_lens[node] for node in chain) for chain in chains] + [1] * padding
    parents = [chain_of.get(node_parent[chain[0]], -1) for chain in chains] + [-1] * padding
    depths = [int(metadata.node_depth[chain[0]]) for chain in chains] + [0] * padding
    assert np.diff(segments.cu_lens).tolist() == lengths
    assert segments.cu_lens[0] == 0
    assert segments.parent.tolist() == parents
    assert segments.depth.tolist() == depths
    assert segments.cu_lens.dtype == segments.parent.dtype == segments.depth.dtype == np.int32


@pytest.mark.parametrize(
    ("borders", "parent", "options", "says"),
    [
        ([0, 2], [-1, 0], {}, r"cu_node_lens \(2,\) must be one-dimensional and one longer than node_parent \(2,\)"),
        ([[0, 2]], [-1], {}, r"cu_node_lens \(1, 2\)"),
        ([0, 2], [[-1]], {}, r"node_parent \(1, 1\)"),
        ([], [], {}, r"cu_node_lens \(0,\)"),
        ([0, 2.7, 5.9], [-1, 0], {}, r"cu_node_lens\[1\] = 2.7 is not an integer"),
        ([0, 2, 5], [-1, 0.6], {}, r"node_parent\[1\] = 0.6 is not an integer"),
        ([0, 2, 5], [float("nan"), 0], {}, r"node_parent\[0\] = nan is not an integer"),
        ([0, 2, float("inf")], [-1, 0], {}, r"cu_node_lens\[2\] = inf is not an integer"),
        ([0, 2, 5], np.array([False, True]), {}, "node_parent has dtype bool; expected integers"),
        ([1, 2], [-1], {}, "cu_node_lens must begin at 0"),
        ([0, 3, 2], [-1, 0], {}, "cu_node_lens must begin at 0 and never decrease"),
        ([0, 1, 2], [0, -1], {}, r"node_parent\[0\] = 0 is not on the path"),
        ([0, 1, 2], [-1, 2], {}, r"node_parent\[1\] = 2 is not on the path"),
        ([0, 1, 2], [-1, 1], {}, r"node_parent\[1\] = 1 is not on the path"),
        ([0, 1, 2, 3, 4], [-1, 0, 0, 1], {}, r"node_parent\[3\] = 1 is not on the path to node 3.*pre-order"),
        ([0, 1, 2, 3], [-1, -1, 0], {}, r"node_parent\[2\] = 0 is not on the path"),
        ([0, 1, 2], [-1, -2], {}, r"node_parent\[1\] = -2 is neither"),
        ([0, 4], [-1], {"padded_size": 3}, "padded_size=3 cannot hold the 4 tokens"),
        ([0], [], {}, "padded_size=0 cannot hold"),
    ],
)
def test_arrays_that_are_no_forest_are_refused(borders, parent, options, says):
    with pytest.raises(ValueError, match=says):
        TreeMetadata.from_nodes(borders, parent, **options)


def test_token_tensors_are_made_on_a_device():
    built = TreeMetadata.from_nodes([0, 2], [-1], device="meta")
    assert built.subtree_end.device.type == built.tree_position_ids.device.type == "meta"


def test_derived_plans_are_built_once():
    metadata = metadata_of([3, 2], [-1, 0])
    calls = []

    def build(of):  # a plan may be falsy and still is a plan
        assert of is metadata
        calls.append(of)

    assert metadata.derived("a", build) is None
    assert metadata.derived("a", build) is None
    assert len(calls) == 1
    metadata.derived("b", build)
    assert len(calls) == 2


def test_memory_and_time_are_linear():
    """A million tokens in 100,001 nodes, one long comb: a square of anything would need terabytes."""
    nodes = 100_001
    node_parent = np.arange(nodes) - 1
    node_parent[2::2] -= 1  # even nodes hang below the last even one: a spine with a leaf at every level
    borders = np.arange(nodes + 1) * 10
    tracemalloc.start()
    with linear_time():
        metadata = TreeMetadata.from_nodes(borders, node_parent)
        segments = metadata.segments
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(segments.parent) == nodes
    assert metadata.max_path_len == 10 * (nodes // 2 + 1)
    assert peak < 100 * metadata.num_tokens


def test_copies_derive_their_plans_again():
    """Plans of some back-ends hold functions, which Megatron could not pickle with a micro-batch."""
    metadata = TreeMetadata.from_nodes([0, 3, 5], [-1, 0])
    metadata.derived("plan", lambda metadata: lambda: None)
    for copied in (pickle.loads(pickle.dumps(metadata)), copy.deepcopy(metadata)):
        assert copied.cache == {}
        assert torch.equal(copied.subtree_end, metadata.subtree_end)
    assert list(metadata.cache) == ["plan"]


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("seed", range(4))
def test_without_first_cuts_the_beginning_of_every_path(seed, depth):
    node_lens, node_parent = random_forest(seed, node_lens=(0, 1, 2, 3, 5))
    whole = metadata_of(node_lens, node_parent, padding=2)
    cut = whole.without_first(depth)
    deep = whole.host_position_ids >= depth
    tokens = np.arange(whole.padded_size)
    assert cut.host_position_ids.tolist() == np.where(deep, whole.host_position_ids - depth, 0).tolist()
    assert cut.host_subtree_end.tolist() == np.where(deep, whole.host_subtree_end, tokens + 1).tolist()
    assert cut.num_tokens == whole.num_tokens


def test_without_first_keeps_the_ends_of_samples():
    layout = fold([Sample(tokens=[1, 2, 3, 4]), Sample(tokens=[1, 2, 5]), Sample(tokens=[1]), Sample(tokens=[1, 2])])
    cut = TreeMetadata.from_layout(layout).without_first(2)
    last = cut.cu_node_lens[1:][cut.sample_node] - 1
    assert last.tolist() == [int(layout.sample_tokens(sample)[-1]) for sample in range(4)]
