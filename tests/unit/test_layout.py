from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from harness.oracles import comb, flat_paths, parent_path, paths_of, sample_lists, samples_through
from harness.speed import linear_time
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.sample import Tempered
from mcore_prefix_tree.trie import build_trie

padded = st.sampled_from([{}, {"pad_to_multiple_of": 4}, {"padded_size": 200}])


@given(sample_lists(), padded)
def test_padding_sees_itself_and_reaches_no_loss(samples, padding):
    layout = fold(samples, **padding)
    tail = np.arange(layout.physical_tokens, layout.padded_size)
    assert layout.subtree_end[tail].tolist() == (tail + 1).tolist()
    assert (layout.subtree_end[: layout.physical_tokens] <= layout.physical_tokens).all()
    assert (layout.position_ids[tail] == 0).all()
    assert (layout.predictor[tail] == -1).all()
    assert (layout.loss_weight[tail] == 0).all()
    assert (layout.input_ids[tail] == 0).all()
    multiple = padding.get("pad_to_multiple_of", 1)
    needed = max(1, -(-layout.physical_tokens // multiple)) * multiple
    assert layout.padded_size == padding.get("padded_size", needed)


@given(sample_lists())
def test_nodes_of_samples(samples):
    layout = fold(samples)
    through = samples_through(samples)
    paths = flat_paths(samples, layout)
    borders = layout.cu_node_lens.tolist()
    assert borders[0] == 0
    assert (np.diff(borders) > 0).all()
    for node, (start, end) in enumerate(pairwise(borders)):
        assert all(through[path] == through[paths[start]] for path in paths[start:end])
        above = layout.node_parent[node]
        assert parent_path(paths[start]) == (paths[borders[above + 1] - 1] if above >= 0 else (paths[start][0], ()))
        assert layout.node_depth[node] == len(paths[start][1]) - 1
        if above >= 0:  # maximal: its samples are not all of its parent's
            assert through[paths[start]] != through[paths[borders[above]]]
    for sample, node in enumerate(layout.sample_node.tolist()):
        assert paths[borders[node + 1] - 1] == paths_of(samples[sample])[-1]
    assert layout.num_trees == len({(s.merge_key, int(s.tokens[0])) for s in samples})
    assert layout.num_supervised == sum(np.count_nonzero(s.loss_mask[1:]) for s in samples)
    assert layout.pair_ratio == (layout.unfolded_pairs / layout.visible_pairs if samples else 1.0)
    assert layout.max_path_len == max((len(s) for s in samples), default=1)


@given(sample_lists(), st.randoms(use_true_random=False))
def test_the_layout_does_not_depend_on_the_order_of_the_samples(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    layout, shuffled = fold(samples), fold([samples[i] for i in order])
    for name in (
        "input_ids",
        "position_ids",
        "subtree_end",
        "predictor",
        "loss_weight",
        "cu_node_lens",
        "node_parent",
        "node_depth",
    ):
        np.testing.assert_array_equal(getattr(layout, name), getattr(shuffled, name), err_msg=name)
    assert layout.num_supervised == shuffled.num_supervised
    for place, index in enumerate(order):
        np.testing.assert_array_equal(shuffled.sample_tokens(place), layout.sample_tokens(index))
        assert shuffled.sample_node[place] == layout.sample_node[index]


def test_no_samples_give_only_padding():
    layout = fold([], pad_to_multiple_of=8)
    assert layout.padded_size == 8
    assert layout.physical_tokens == layout.logical_tokens == layout.num_nodes == layout.num_samples == 0
    assert layout.fold_ratio == layout.pair_ratio == 1.0
    assert layout.max_path_len == 1
    assert layout.input_ids.tolist() == [0] * 8
    assert layout.subtree_end.tolist() == list(range(1, 9))


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        (5, {"padded_size": 4}, "padded_size=4 cannot hold the 5 unique tokens"),
        (5, {"padded_size": 0}, "padded_size=0 cannot hold"),
        (0, {"padded_size": 0}, "padded_size=0"),
        (5, {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 must be at least 1"),
        (5, {"padded_size": 9, "pad_to_multiple_of": 4}, "padded_size=9 is not a multiple of pad_to_multiple_of=4"),
    ],
)
def test_impossible_padding_is_refused(tokens, options, says):
    with pytest.raises(ValueError, match=says):
        fold([Sample(tokens=range(tokens))] if tokens else [], **options)


def test_more_tokens_than_a_layout_can_number(monkeypatch):
    monkeypatch.setattr("mcore_prefix_tree.layout.flat.INT32_MAX", 3)
    assert fold([Sample(tokens=[1, 2, 3])]).physical_tokens == 3
    with pytest.raises(ValueError, match="4 tokens are more than a layout's 3; fold fewer samples at once"):
        fold([Sample(tokens=[1, 2, 3]), Sample(tokens=[4])])


def test_dtypes_are_those_of_the_docstring():
    layout = fold([Sample(tokens=[1, 2]), Sample(tokens=[1, 3])], padded_size=4)
    kinds = {
        np.int64: ("cu_sample_lens",),
        np.float64: ("loss_weight",),
        np.int32: (
            "input_ids", "position_ids", "subtree_end", "predictor", "cu_node_lens", "node_parent", "node_depth",
            "sample_map", "sample_node",
        ),
    }  # fmt: skip
    for dtype, names in kinds.items():
        for name in names:
            assert getattr(layout, name).dtype == dtype, name


def test_deep_and_wide_forests_are_folded_in_linear_time():
    """A comb of 5,000 levels and a star of 20,000 leaves: recursion or a walk per token and level would not end."""
    depth, leaves = 5_000, 20_000
    samples = comb(depth)
    samples += [Sample(tokens=[2, leaf]) for leaf in range(leaves)]
    with linear_time():
        layout = fold(samples)
    assert layout.physical_tokens == 2 * depth + leaves + 1
    assert layout.max_path_len == depth + 1
    assert layout.subtree_end[0] == 2 * depth
    np.testing.assert_array_equal(layout.input_ids[layout.sample_tokens(depth - 1)], samples[depth - 1].tokens)


def test_memory_is_that_of_the_unique_tokens():
    """Sorting needs 4 bytes for a logical token; the layout nothing, until the sample map is requested."""
    prompt = list(range(3000))
    samples = [Sample(tokens=[*prompt, 5000 + leaf]) for leaf in range(200)]
    logical = sum(map(len, samples))
    trie, sorting = peak_of(lambda: build_trie(samples))
    layout, folding = peak_of(lambda: fold(samples, trie=trie))
    _, mapping = peak_of(lambda: layout.sample_map)
    assert 4 * logical <= sorting < 4.5 * logical
    assert folding < 100 * layout.physical_tokens < logical
    assert 4 * logical <= mapping < 4.5 * logical


def peak_of(run):
    tracemalloc.start()
    try:
        return run(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_every_token_has_the_temperature_of_its_samples():
    hot, cold = Tempered(temperature=2.0), Tempered(temperature=0.5)
    samples = [
        Sample(tokens=[1, 2, 3], merge_key=hot),
        Sample(tokens=[1, 2], merge_key=cold),
        Sample(tokens=[1, 2, 4, 5], merge_key=hot),
        Sample(tokens=[1, 2]),
        Sample(tokens=[1, 7], merge_key=cold),
    ]
    layout = fold(samples, pad_to_multiple_of=16)
    assert layout.temperature.dtype == np.float64
    for index, sample in enumerate(samples):
        assert (layout.temperature[layout.sample_tokens(index)] == sample.temperature).all()
    assert (layout.temperature[layout.physical_tokens :] == 1).all()
    assert layout.num_trees == 3
    assert fold([Sample(tokens=[1, 2])]).temperature is None
