from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from harness.oracles import paths_of, sample_lists
from harness.speed import linear_time
from hypothesis import example, given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.trie import Sharing, build_trie, trie_from_order
from mcore_prefix_tree.trie import trie as trie_module


@given(sample_lists())
def test_shared_is_the_longest_prefix_that_was_there_before(samples):
    trie = build_trie(samples)
    seen: set = set()
    for index, shared in zip(trie.order.tolist(), trie.shared.tolist(), strict=True):
        paths = paths_of(samples[index])
        assert shared == sum(path in seen for path in paths)
        seen.update(paths)


def test_large_token_ids_sort_as_numbers():
    """Bytes are compared, so a byte-order slip would put 256 before 1 and split prefixes."""
    samples = [Sample(tokens=[t]) for t in (65536, 1, 256, 2**31 - 1, 255, 0)]
    trie = build_trie(samples)
    assert [int(samples[i].tokens[0]) for i in trie.order] == [0, 1, 255, 256, 65536, 2**31 - 1]


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
@example([Sample([1, 2, 3, 4], loss_mask=[0, 0, 1, 1])] * 2, "prompt", 0)
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


@given(sample_lists(), st.sampled_from(["all", "prompt"]), st.integers(1, 3))
def test_samples_that_are_compared_part_by_part_have_the_same_order(samples, share, part):
    whole = build_trie(samples, Sharing(share=share))
    with patch.multiple(trie_module, _AT_ONCE=part * len(samples), _LEAST=1):
        parts = build_trie(samples, Sharing(share=share))
    np.testing.assert_array_equal(parts.order, whole.order)
    np.testing.assert_array_equal(parts.shared, whole.shared)


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
