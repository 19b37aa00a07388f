"""Block lists against the dense mask, tile by tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness.oracles import metadata_of, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree.attention.reference import visibility, window_visibility
from mcore_prefix_tree.attention.tile_blocks import block_plan, visible_pairs

WINDOWS = [None, 1, 2, 5, 40, 10_000]


def dense_mask(metadata, window):
    visible = visibility(metadata)
    if window is not None:
        visible = visible & window_visibility(metadata, window)
    return visible.numpy()


def tiles_of(tiles):
    """(row, block, kind) of every tile, each kind ascending."""
    found = []
    for row, bounds in enumerate(tiles.bounds.tolist()):
        assert bounds == sorted(bounds)
        for kind, start, end in zip(("diagonal", "full", "tail"), bounds, bounds[1:], strict=False):
            blocks = list(range(start, end)) if tiles.blocks is None else tiles.blocks[start:end].tolist()
            assert blocks == sorted(set(blocks))
            found += [(row, block, kind) for block in blocks]
    return found


def assert_plan_is_the_mask(metadata, query_block, key_block, window):
    mask = dense_mask(metadata, window)
    size = metadata.padded_size
    plan = block_plan(metadata, query_block, key_block, window=window)
    kinds = {(query, key): kind for key, query, kind in tiles_of(plan.by_key)}
    by_query = tiles_of(plan.by_query)
    assert {(query, key): kind for query, key, kind in by_query} == kinds
    assert plan.visited == len(kinds) == len(by_query)
    assert plan.visible_pairs == visible_pairs(metadata, window=window) == mask.sum()
    assert plan.efficiency == pytest.approx(mask.sum() / (len(kinds) * query_block * key_block))

    index = np.arange(size)
    left = mask.copy()
    for (query, key), kind in kinds.items():
        rows = slice(query * query_block, (query + 1) * query_block)
        columns = slice(key * key_block, (key + 1) * key_block)
        tile = mask[rows, columns]
        assert tile.size
        assert window is not None or tile.any()
        left[rows, columns] = False
        # Every pair that the comparisons of its kind cannot rule out must be visible.
        assert kind != "full" or (tile.all() and tile.shape[1] == key_block)
        assert kind == "diagonal" or (index[columns].max() <= index[rows].min() and tile.shape[1] == key_block)
        assert kind != "diagonal" or query_block == 1 or np.intersect1d(index[rows], index[columns]).size
    assert not left.any()

    if window is None:
        assert plan.by_key.blocks is None
        # No tile that is visible throughout goes masked, except on the diagonal.
        for (query, key), kind in kinds.items():
            tile = mask[query * query_block : (query + 1) * query_block, key * key_block : (key + 1) * key_block]
            assert kind != "tail" or not tile.all()


sizes = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64, 128])


@settings(max_examples=300)
@given(
    st.integers(0, 10_000),
    st.integers(0, 30),
    st.sampled_from([(1, 2, 5), (0, 1, 3), (0, 20), (4, 9, 33)]),
    st.sampled_from([0.05, 0.5]),
    st.integers(1, 9),
    sizes,
    sizes,
    st.sampled_from(WINDOWS),
)
def test_every_visible_pair_is_in_a_tile_and_full_tiles_are_full(
    seed, nodes, lens, roots, padding, query_block, key_block, window
):
    forest = random_forest(seed, nodes=nodes, node_lens=lens, root_rate=roots)
    assert_plan_is_the_mask(metadata_of(*forest, padding=padding), query_block, key_block, window)


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(0, 100), st.integers(0, 5), sizes, sizes, st.sampled_from(WINDOWS))
def test_blocks_that_nobody_reads_meet_no_key(seed, share, padding, query_block, key_block, window):
    metadata = metadata_of(*random_forest(seed, nodes=12, node_lens=(1, 5, 40), root_rate=0.1), padding=padding)
    unread = metadata.num_tokens * share // 100
    every = block_plan(metadata, query_block, key_block, window=window)
    plan = block_plan(replace(metadata, unread=unread, cache={}), query_block, key_block, window=window)
    read = {tile for tile in tiles_of(every.by_query) if tile[0] >= unread // query_block}
    assert set(tiles_of(plan.by_query)) == read
    assert {(query, key, kind) for key, query, kind in tiles_of(plan.by_key)} == read
    assert plan.visited == len(read)
    assert plan.visible_pairs == dense_mask(metadata, window)[unread:].sum()


@pytest.mark.parametrize("border", [*range(57, 66), *range(120, 131)])
def test_node_borders_around_block_sizes(border):
    metadata = metadata_of([border, 1, 70, 3, 0, 2, 140], [-1, 0, 0, 2, 2, 0, -1], padding=1)
    for window in WINDOWS:
        assert_plan_is_the_mask(metadata, 128, 64, window)
        assert_plan_is_the_mask(metadata, 64, 128, window)


def test_full_tiles_of_a_ragged_end():
    """The last query block of one long sample is full everywhere but on its diagonal, although its rows end early."""
    plan = block_plan(metadata_of([1000], [-1]), 128, 128)
    assert plan.by_query.bounds[-1].tolist()[1:] == [29, 36, 36]


def test_longest_first():
    plan = block_plan(metadata_of([64, 64, 64, 64], [-1, 0, 0, 0]), 64, 64)
    assert plan.by_query.longest_first.tolist() == [1, 2, 3, 0]
    assert plan.by_key.longest_first.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("side", ["by_key", "by_query"])
def test_padded_form(side, window):
    forest = random_forest(5, nodes=30, node_lens=(10, 40, 90))
    tiles = getattr(block_plan(metadata_of(*forest, padding=3), 64, 32, window=window), side)
    both = {True: {}, False: {}}
    for row, block, kind in tiles_of(tiles):
        both[kind == "full"].setdefault(row, set()).add(block)
    for full, expected in both.items():
        counts, blocks = tiles.padded(full=full)
        assert counts.sum() == sum(map(len, expected.values()))
        for row, (count, listed) in enumerate(zip(counts.tolist(), blocks.tolist(), strict=True)):
            assert listed[:count] == sorted(expected.get(row, ()))
            assert not any(listed[count:])


def test_plans_are_kept_for_each_pair_of_sizes_and_window():
    metadata = metadata_of([5, 6], [-1, 0])
    plan = block_plan(metadata, 4, 2)
    assert block_plan(metadata, 4, 2) is plan
    others = [block_plan(metadata, 2, 4), block_plan(metadata, 4, 2, window=3)]
    assert all(other is not plan for other in others)
