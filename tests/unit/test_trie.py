from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from oracles import comb, parent_path, paths_of, sample_lists, samples_through

from mcore_prefix_tree import Sample
from mcore_prefix_tree.trie import build_trie
from mcore_prefix_tree.trie.sort import common_prefix_length


@given(sample_lists())
def test_every_unique_token_has_one_place(samples):
    trie = build_trie(samples)
    assert trie.num_tokens == len(samples_through(samples))
    assert sorted(trie.order.tolist()) == list(range(len(samples)))


@given(sample_lists())
def test_shared_is_the_longest_prefix_that_was_there_before(samples):
    trie = build_trie(samples)
    seen: set = set()
    for index, shared in zip(trie.order.tolist(), trie.shared.tolist(), strict=True):
        paths = paths_of(samples[index])
        assert shared == sum(path in seen for path in paths)
        seen.update(paths)


@given(sample_lists())
def test_nodes_are_maximal_runs_of_one_set_of_samples(samples):
    """Compared by content: (merge key, path up to the node's end) -> length, parent's end, depth, samples that end."""
    through = samples_through(samples)
    expected = {}
    ends_at = {paths_of(sample)[-1] for sample in samples}
    for path, owners in through.items():
        # A run goes on as long as one same set of samples does; it ends where nobody continues it whole.
        if any(parent_path(other) == path and through[other] == owners for other in through):
            continue
        run = [path]
        while through.get(parent_path(run[-1])) == owners:
            run.append(parent_path(run[-1]))
        above = parent_path(run[-1])
        expected[path] = (len(run), above if above[1] else None, len(above[1]), path in ends_at)

    trie = build_trie(samples)
    ids = _flat_paths(samples, trie)
    last = [ids[end - 1] for end in trie.cu_node_lens[1:]]
    actual = {
        last[node]: (
            int(trie.cu_node_lens[node + 1] - trie.cu_node_lens[node]),
            last[trie.node_parent[node]] if trie.node_parent[node] >= 0 else None,
            int(trie.node_depth[node]),
            node in trie.sample_node,
        )
        for node in range(trie.num_nodes)
    }
    assert actual == expected
    assert [last[node] for node in trie.sample_node] == [paths_of(sample)[-1] for sample in samples]


@given(sample_lists())
def test_nodes_are_in_depth_first_pre_order(samples):
    trie = build_trie(samples)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(trie.node_parent.tolist()):
        children.setdefault(parent, []).append(node)
    order, ends, stack = [], {}, [("open", root) for root in reversed(children.get(-1, []))]
    while stack:
        what, node = stack.pop()
        if what == "close":
            ends[node] = order[-1]
            continue
        order.append(node)
        stack.append(("close", node))
        stack += [("open", child) for child in reversed(children.get(node, []))]
    assert order == list(range(trie.num_nodes))
    assert trie.node_subtree_end.tolist() == [int(trie.cu_node_lens[ends[n] + 1]) for n in range(trie.num_nodes)]


def _flat_paths(samples, trie):
    """The path of every flat token, from ``order`` and ``shared`` alone."""
    flat = []
    for index, shared in zip(trie.order.tolist(), trie.shared.tolist(), strict=True):
        flat += paths_of(samples[index])[shared:]
    return flat


def test_two_merge_keys_share_nothing():
    samples = [Sample(tokens=[1, 2, 3], merge_key="a"), Sample(tokens=[1, 2, 3], merge_key="b")]
    trie = build_trie(samples)
    assert trie.num_tokens == 6
    assert trie.node_parent.tolist() == [-1, -1]
    assert trie.sample_node[0] != trie.sample_node[1]


def test_a_strict_prefix_ends_in_an_inner_node_and_duplicates_in_one():
    samples = [Sample(tokens=[1, 2, 3, 4]), Sample(tokens=[1, 2]), Sample(tokens=[1, 2, 3, 4])]
    trie = build_trie(samples)
    assert trie.cu_node_lens.tolist() == [0, 2, 4]
    assert trie.node_parent.tolist() == [-1, 0]
    assert trie.sample_node.tolist() == [1, 0, 1]


def test_nothing_folds_to_nothing():
    trie = build_trie([])
    assert trie.num_nodes == trie.num_tokens == 0
    assert trie.cu_node_lens.tolist() == [0]


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [], 0), ([1], [], 0), ([1], [2], 0), ([1, 2], [1, 2], 2), ([1, 2, 9], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1)],
)
def test_common_prefix_length(left, right, length):
    arrays = np.array(left, dtype=np.int32), np.array(right, dtype=np.int32)
    assert common_prefix_length(*arrays) == common_prefix_length(*reversed(arrays)) == length


def test_large_token_ids_sort_as_numbers():
    """Bytes are compared, so a byte-order slip would put 256 before 1 and split prefixes."""
    samples = [Sample(tokens=[t]) for t in (65536, 1, 256, 2**31 - 1, 255, 0)]
    trie = build_trie(samples)
    assert [int(samples[i].tokens[0]) for i in trie.order] == [0, 1, 255, 256, 65536, 2**31 - 1]


def test_comb_of_depth_5000():
    """Each sample is the spine up to some depth and one token off it: 12.5 million logical tokens, 10,000 nodes."""
    depth = 5_000
    samples = comb(depth)
    started = time.perf_counter()
    trie = build_trie(samples)
    elapsed = time.perf_counter() - started
    assert trie.num_nodes == 2 * depth - 1
    assert trie.num_tokens == 2 * depth
    assert trie.node_depth.max() == depth - 1
    # Anything quadratic in a node's descendants or in path lengths, in Python, takes minutes here.
    assert elapsed < 10


def test_star_of_20000_leaves():
    leaves = 20_000
    samples = [Sample(tokens=[7, 7, leaf]) for leaf in range(leaves)]
    started = time.perf_counter()
    trie = build_trie(samples)
    elapsed = time.perf_counter() - started
    assert trie.num_nodes == leaves + 1
    assert (trie.node_parent[1:] == 0).all()
    assert (np.diff(trie.cu_node_lens) == [2] + [1] * leaves).all()
    assert trie.node_subtree_end[0] == leaves + 2
    assert trie.sample_node.tolist() == list(range(1, leaves + 1))
    assert elapsed < 5
