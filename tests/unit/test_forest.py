from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
from harness.oracles import comb, flat_paths, parent_path, paths_of, sample_lists, samples_through
from hypothesis import given

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.layout import forest as forests
from mcore_prefix_tree.trie import build_trie


@given(sample_lists())
def test_counts(samples):
    layout = fold(samples, pad_to_multiple_of=4)
    of_samples = forests.SampleForest.of(samples, build_trie(samples))
    assert of_samples.counts() == layout.counts()
    found = SimpleNamespace(**layout.counts())
    through = samples_through(samples)
    assert found.samples == len(samples)
    assert found.logical_tokens == sum(map(len, samples))
    assert found.physical_tokens == len(through)
    assert found.fold_ratio == (found.logical_tokens / len(through) if through else 1.0)
    assert found.trees == sum(len(path[1]) == 1 for path in through)
    assert found.supervised_tokens == sum(int((sample.loss_mask[1:] > 0).sum()) for sample in samples)
    assert found.longest_path == max(map(len, samples), default=0)
    assert found.unfolded_pairs == sum(len(s) * (len(s) + 1) // 2 for s in samples)
    assert found.visible_pairs == sum(len(path[1]) for path in through)
    for keys in range(4):
        assert layout.count_pairs(keys) == sum(min(len(path[1]), keys) for path in through)
    # Nodes along a sample: its set of companions changes at every border.
    runs = [len({frozenset(through[path]) for path in paths_of(sample)}) for sample in samples]
    assert found.deepest_node == max(runs, default=0)
    children = Counter(parent_path(path) for path in through)
    branching = {path for path, count in children.items() if path[1] and count > 1}
    above = [len({parent_path(path) for path in paths_of(sample)} & branching) for sample in samples]
    assert found.segment_levels == max((1 + count for count in above), default=0)
    assert found.segment_states == sum(children[path] for path in branching)


@given(sample_lists())
def test_samples_through_every_node(samples):
    layout = fold(samples)
    paths, through = flat_paths(samples, layout), samples_through(samples)
    expected = [len(through[paths[start]]) for start in layout.cu_node_lens[:-1]]
    assert layout.samples_through.tolist() == expected


@given(sample_lists())
def test_trees_by_size(samples):
    layout = fold(samples)
    trees = forests.largest_trees(layout, 1000)
    expected = {}
    for path, owners in samples_through(samples).items():
        expected.setdefault((path[0], path[1][0]), []).append(len(owners))
    found = {}
    paths = flat_paths(samples, layout)
    for tree in trees:
        root = paths[layout.cu_node_lens[tree.root]]
        found[root[0], root[1][0]] = (tree.physical_tokens, tree.logical_tokens, tree.samples)
    assert found == {root: (len(counts), sum(counts), max(counts)) for root, counts in expected.items()}
    sizes = [tree.physical_tokens for tree in trees]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(tree.nodes for tree in trees) == layout.num_nodes
    assert forests.largest_trees(layout, 2) == trees[:2]
    assert forests.largest_trees(layout, 0) == []


@given(sample_lists())
def test_chains_end_at_branches(samples):
    layout = fold(samples)
    chains, of_samples = forests.chains(layout), forests.SampleForest.of(samples, build_trie(samples))
    children = np.bincount(layout.node_parent[layout.node_parent >= 0], minlength=layout.num_nodes)
    for segment, first in enumerate(chains.first_node.tolist()):
        nodes = np.flatnonzero(chains.segment_of_node == segment)
        assert nodes.tolist() == list(range(first, first + len(nodes)))
        assert (children[nodes[:-1]] == 1).all()
        assert children[nodes[-1]] != 1
        assert len(chains.children[segment]) == children[nodes[-1]]
        for child in chains.children[segment]:
            assert layout.node_parent[chains.first_node[child]] == nodes[-1]
        below = sum(chains.physical_tokens[child] for child in chains.children[segment])
        own = layout.cu_node_lens[nodes[-1] + 1] - layout.cu_node_lens[first]
        flat = layout.input_ids[layout.cu_node_lens[first] : layout.cu_node_lens[nodes[-1] + 1]]
        assert of_samples.tokens(first, nodes[-1] + 1).tolist() == flat.tolist()
        assert chains.physical_tokens[segment] == own + below
        assert chains.samples[segment] == layout.samples_through[first]


def test_a_deep_comb_and_a_wide_star():
    layout = fold([*comb(2_000), *(Sample(tokens=[9, leaf]) for leaf in range(5_000))])
    found = SimpleNamespace(**layout.counts())
    assert found.deepest_node == 2_000
    assert found.nodes == 2 * 2_000 - 1 + 5_001
    assert [tree.samples for tree in forests.largest_trees(layout, 5)] == [5_000, 2_000]
