from __future__ import annotations

import numpy as np
import pytest
from harness.oracles import comb, parent_path, paths_of, sample_lists, samples_through
from harness.speed import linear_time
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.trie import Sharing, build_trie, trie_from_order
from mcore_prefix_tree.trie.trie import common_prefix_length, prompt_length


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
        # A run continues as long as the same set of samples does; it ends when no sample set continues it completely.
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
    """The path of every flat token, from only ``order`` and ``shared``."""
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
    with linear_time():
        trie = build_trie(samples)
    assert trie.num_nodes == 2 * depth - 1
    assert trie.num_tokens == 2 * depth
    assert trie.node_depth.max() == depth - 1


def test_star_of_20000_leaves():
    leaves = 20_000
    samples = [Sample(tokens=[7, 7, leaf]) for leaf in range(leaves)]
    with linear_time():
        trie = build_trie(samples)
    assert trie.num_nodes == leaves + 1
    assert (trie.node_parent[1:] == 0).all()
    assert (np.diff(trie.cu_node_lens) == [2] + [1] * leaves).all()
    assert trie.node_subtree_end[0] == leaves + 2
    assert trie.sample_node.tolist() == list(range(1, leaves + 1))


def common(left, right, share="all", least=0):
    """Leading tokens that two samples are to have in common, by the words of the options."""
    if left.merge_key != right.merge_key:
        return 0
    count = 0
    for (at, a), b in zip(enumerate(left.tokens.tolist()), right.tokens.tolist(), strict=False):
        if a != b or (share == "prompt" and (left.loss_mask[1 : at + 1].any() or right.loss_mask[1 : at + 1].any())):
            break
        count += 1
    return count if count >= least else 0


@given(sample_lists(), st.sampled_from(["all", "prompt"]), st.integers(0, 5))
def test_two_samples_share_as_the_options_require(samples, share, least):
    layout = fold(samples, trie=build_trie(samples, Sharing(share=share, min_shared_tokens=least)))
    for i, left in enumerate(samples):
        for j, right in enumerate(samples[:i]):
            ours, theirs = layout.sample_tokens(i).tolist(), layout.sample_tokens(j).tolist()
            expected = common(left, right, share, least)
            assert ours[:expected] == theirs[:expected]
            assert not set(ours[expected:]) & set(theirs[expected:])
        np.testing.assert_array_equal(layout.input_ids[layout.sample_tokens(i)], left.tokens)
    assert layout.physical_tokens == len(set(layout.sample_map.tolist()))
    assert layout.loss_weight.sum() == sum(float(s.loss_mask[1:].sum()) for s in samples)


@given(sample_lists(), st.sampled_from(["all", "prompt"]), st.integers(0, 5), st.randoms(use_true_random=False))
def test_options_do_not_make_the_trie_depend_on_the_order(samples, share, least, random):
    shuffled = random.sample(samples, len(samples))
    one, other = (build_trie(some, Sharing(share=share, min_shared_tokens=least)) for some in (samples, shuffled))
    for name in ("shared", "cu_node_lens", "node_parent", "node_depth", "node_subtree_end"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert [samples[i].tokens.tolist() for i in one.order] == [shuffled[i].tokens.tolist() for i in other.order]


def test_completions_of_one_prompt_share_only_the_prompt():
    samples = [Sample(tokens=[1, 2, 3, *more], loss_mask=[0, 0, 0, 1, 1]) for more in ([7, 8], [7, 9], [7, 8])]
    assert build_trie(samples).num_tokens == 3 + 1 + 2
    assert build_trie(samples, Sharing(share="prompt")).num_tokens == 3 + 3 * 2
    assert build_trie(samples, Sharing(min_shared_tokens=5)).num_tokens == 5 + 5
    assert build_trie(samples, Sharing(min_shared_tokens=6)).num_tokens == 15


@pytest.mark.parametrize(("mask", "length"), [([1, 0, 1], 2), ([1, 1, 0], 1), ([1, 0, 0], 3), ([0], 1), ([1], 1)])
def test_prompt_ends_at_the_first_scored_token(mask, length):
    assert prompt_length(Sample(tokens=[5] * len(mask), loss_mask=mask)) == length


@pytest.mark.parametrize(
    ("options", "says"),
    [({"share": "most"}, "share='most' must be one of 'all', 'prompt'"), ({"min_shared_tokens": -1}, "must be >= 0")],
)
def test_unknown_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Sharing(**options)


@pytest.mark.parametrize("shape", ["comb", "star", "equal", "alone"])
def test_a_hundred_thousand_samples(shape):
    """Nodes from only longest common prefixes: a comb this deep has 5 billion logical tokens."""
    count = 100_000
    index = np.arange(count)
    shared, lengths, nodes, tokens = {
        "comb": (index, index + 2, 2 * count - 1, 2 * count),
        "star": (np.where(index, 3, 0), np.full(count, 4), count + 1, count + 3),
        "equal": (np.where(index, 9, 0), np.full(count, 9), 1, 9),
        "alone": (0 * index, np.full(count, 5), count, 5 * count),
    }[shape]
    with linear_time():
        trie = trie_from_order(index, shared, lengths)
    assert (trie.num_nodes, trie.num_tokens) == (nodes, tokens)
    path_ends = trie.node_depth + np.diff(trie.cu_node_lens)
    np.testing.assert_array_equal(path_ends[trie.sample_node], lengths)
    below = trie.node_parent >= 0
    np.testing.assert_array_equal(trie.node_depth[below], path_ends[trie.node_parent[below]])
    assert trie.node_depth.max() == {"comb": count - 1, "star": 3, "equal": 0, "alone": 0}[shape]


def test_a_path_of_a_hundred_thousand_tokens_with_teeth():
    depth, teeth = 100_000, 100
    samples = [Sample(tokens=[0] * at + [1]) for at in range(depth // teeth, depth + 1, depth // teeth)]
    trie = build_trie(samples)
    assert trie.num_tokens == depth + teeth
    assert trie.num_nodes == 2 * teeth - 1
    assert int((trie.node_depth + np.diff(trie.cu_node_lens)).max()) == depth + 1
