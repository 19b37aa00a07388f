from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_parents, sample_lists

from mcore_prefix_tree import Sample, SampleError, fold
from mcore_prefix_tree.trie import build_trie, trie_from_groups, trie_from_nodes


@given(sample_lists(), st.randoms(use_true_random=False))
def test_declaring_the_trie_s_own_nodes_gives_the_trie(samples, random):
    trie = build_trie(samples)
    ids = fold(samples).input_ids
    tokens = [ids[a:b] for a, b in zip(trie.cu_node_lens, trie.cu_node_lens[1:], strict=False)]
    # In any order, and with an empty node nobody ends in.
    number = random.sample(range(trie.num_nodes), trie.num_nodes)
    place = {node: at for at, node in enumerate(number)} | {-1: -1}
    declared = trie_from_nodes(
        samples,
        node_tokens=[*(tokens[node] for node in number), []],
        node_parent=[*(place[int(trie.node_parent[node])] for node in number), -1],
        sample_node=[place[int(node)] for node in trie.sample_node],
    )
    one, other = fold(samples), fold(samples, trie=declared)
    assert declared.num_nodes == trie.num_nodes
    assert declared.num_tokens == trie.num_tokens
    for index in range(len(samples)):  # siblings may be in another order; what each sample meets on its path may not
        mine, theirs = one.sample_tokens(index), other.sample_tokens(index)
        np.testing.assert_array_equal(one.input_ids[mine], other.input_ids[theirs])
        np.testing.assert_array_equal(one.position_ids[mine], other.position_ids[theirs])
        np.testing.assert_array_equal(one.loss_weight[mine], other.loss_weight[theirs])
        below, under = (layout.subtree_end - np.arange(layout.padded_size) for layout in (one, other))
        np.testing.assert_array_equal(below[mine], under[theirs])


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_what_is_declared_is_what_is_shared(random, nodes):
    """Sibling nodes with equal tokens stay apart, and a sample may end at any node."""
    parents = random_parents(random, nodes)
    tokens = [[random.randint(0, 1) for _ in range(random.choice([0, 1, 3]))] for _ in parents]
    paths: list[list[int]] = []
    lineage: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + tokens[node])
        lineage.append((lineage[parent] if parent >= 0 else []) + [node] * len(tokens[node]))
    ends = [node for node in random.choices(range(nodes), k=8) if paths[node]]
    samples = [Sample(tokens=paths[node]) for node in ends]
    trie = trie_from_nodes(samples, node_tokens=tokens, node_parent=parents, sample_node=ends)
    layout = fold(samples, trie=trie)
    used = {(node, at - lineage[end].index(node)) for end in ends for at, node in enumerate(lineage[end])}
    assert layout.physical_tokens == len(used)
    for i, left in enumerate(ends):
        for j, right in enumerate(ends):
            same = [a == b for a, b in zip(lineage[left], lineage[right], strict=False)]
            flat = zip(layout.sample_tokens(i).tolist(), layout.sample_tokens(j).tolist(), strict=False)
            assert [a == b for a, b in flat] == same


def test_groups_share_their_prompt_only():
    samples = [Sample(tokens=[1, 2, *more]) for more in ([5, 6], [5, 6], [5], [])]
    samples.append(Sample(tokens=[1, 2, 9]))
    trie = trie_from_groups(samples, [(2, [0, 1, 2, 3]), (0, [4])])
    assert trie.num_tokens == 2 + 2 + 2 + 1 + 3
    assert trie.num_nodes == 5
    assert trie.sample_node[3] == trie.node_parent[1] == 0
    for everyone in (range(5), np.arange(5), tuple(range(5))):
        one = trie_from_groups(samples, [(2, everyone)])
        assert one.num_tokens == 2 + 2 + 2 + 1 + 1
    assert trie_from_groups([], []).num_nodes == 0


def test_a_radix_tree_a_hundred_thousand_deep():
    depth = 100_000
    sample = Sample(tokens=np.arange(depth))
    trie = trie_from_nodes(
        [sample],
        node_tokens=np.arange(depth).reshape(depth, 1),
        node_parent=range(-1, depth - 1),
        sample_node=[depth - 1],
    )
    assert trie.num_nodes == 1
    assert trie.num_tokens == depth


NAMED = [
    Sample(tokens=[1, 2, 3], source="a.jsonl:1"),
    Sample(tokens=[1, 2, 4], source="a.jsonl:2"),
    Sample(tokens=[1, 2, 5], merge_key="hot", source="a.jsonl:3"),
]


@pytest.mark.parametrize(
    ("groups", "kind", "says"),
    [
        ([(2, [0])], ValueError, "each of the 3 samples exactly once"),
        ([(2, [0, 1, 1, 2])], ValueError, "each of the 3 samples exactly once"),
        ([(2, [0, 1]), (0, [2]), (0, [])], ValueError, "group 2 must have at least one sample"),
        ([(2, np.arange(2)), (0, [2]), (0, np.arange(0))], ValueError, "group 2 must have at least one sample"),
        ([(-1, [0, 1, 2])], ValueError, "group 0 must have"),
        ([(3, [0, 1]), (0, [2])], SampleError, "a.jsonl:2: declared to share 3 tokens with a.jsonl:1, but token 2"),
        ([(4, [0, 1]), (0, [2])], SampleError, "a.jsonl:1: 3 tokens are fewer than the declared prompt of 4"),
        ([(2, [0, 1, 2])], SampleError, "a.jsonl:3: .* merge_key 'hot' is not None"),
    ],
)
def test_wrong_groups_are_refused(groups, kind, says):
    with pytest.raises(kind, match=says):
        trie_from_groups(NAMED, groups)


@pytest.mark.parametrize(
    ("tokens", "parent", "ends", "kind", "says"),
    [
        ([[1, 2], [3], [4]], [-1, 0], [1, 2], ValueError, "node_parent .2. needs an entry for each of 3"),
        ([[1, 2], [3], [4]], [-1, 0, 0], [1], ValueError, "sample_node .1. one for each of 2 samples"),
        ([[1, 2], [3], [4]], [-1, 0, 7], [1, 2], ValueError, r"node_parent\[2\] = 7 is neither"),
        ([[1, 2], [3], [4]], [-1, 0.5, 0], [1, 2], ValueError, r"node_parent\[1\] = 0.5 is neither"),
        ([[1, 2], [3], [4]], [-1, 0, 0], [1, 2.5], ValueError, r"sample_node\[1\] = 2.5 is not one of 3"),
        ([[1, 2], [3], [4]], [-1, 2, 1], [1, 2], ValueError, "node_parent leads from node 1 around a loop"),
        ([[1, 2], [3], [4]], [-1, 0, 0], [1, 3], ValueError, r"sample_node\[1\] = 3 is not one of 3"),
        ([[1, 2], [3], [4]], [-1, 0, 0], [1, 0], SampleError, "a.jsonl:2: 3 tokens, but the path to its node 0 has 2"),
        ([[1, 2], [3], [9]], [-1, 0, 0], [1, 2], SampleError, "a.jsonl:2: token 2 differs from that of node 2"),
        ([[1, 9], [3], [4]], [-1, 0, 0], [1, 2], SampleError, "a.jsonl:1: token 1 differs from that of node 0"),
        ([[1, 2, 3]], [-1], [0, 0], SampleError, "a.jsonl:2: declared to share 3 tokens with a.jsonl:1, but token 2"),
    ],
)
def test_wrong_nodes_are_refused(tokens, parent, ends, kind, says):
    with pytest.raises(kind, match=says):
        trie_from_nodes(NAMED[:2], node_tokens=tokens, node_parent=parent, sample_node=ends)


def test_nodes_are_not_shared_across_merge_keys():
    with pytest.raises(SampleError, match="merge_key 'hot' is not None"):
        trie_from_nodes(NAMED[1:], node_tokens=[[1, 2], [4], [5]], node_parent=[-1, 0, 0], sample_node=[1, 2])


def test_a_trie_of_other_samples_is_refused():
    with pytest.raises(ValueError, match="the trie is of 3 samples, but there are 2"):
        fold(NAMED[:2], trie=build_trie(NAMED))
