"""Plans as launches read them: no kernel runs here, so these run everywhere."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from harness.oracles import metadata_of, random_forest
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.attention.tile_blocks import block_plan
from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan
from mcore_prefix_tree.attention.triton_tree.config import Configs, Launch
from mcore_prefix_tree.attention.triton_tree.kernel_calls import PARTIAL_BYTES, splits_for


def busy(metadata, heads, kv_heads, splits, processors):
    """Share of the time of dK and dV in which processors work, each on the next program in the list."""
    tiles = block_plan(metadata, 64, 128).by_key
    # Half a tile for the other work of a program.
    length = (tiles.bounds[:, 3] - tiles.bounds[:, 0])[tiles.longest_first] + 0.5
    costs = np.repeat(length * (heads // kv_heads // splits), kv_heads * splits).tolist()
    free_at = [0.0] * processors
    for cost in costs:
        heapq.heapreplace(free_at, free_at[0] + cost)
    return sum(costs) / processors / max(free_at)


@pytest.mark.parametrize(
    ("prompt", "response", "heads", "kv_heads", "with_two_each"),
    [
        (4096, 1024, 8, 2, 0.50),
        (4096, 1024, 8, 1, 0.50),
        (4096, 1024, 16, 4, 0.99),
        (1000, 1750, 8, 2, 0.24),
        (1000, 1750, 8, 1, 0.24),
        (1000, 1750, 16, 4, 0.48),
    ],
)
def test_few_key_heads_keep_a_device_busy(prompt, response, heads, kv_heads, with_two_each):
    """Programs of two a processor would, in number; but the prompt's have most of the work."""
    metadata = metadata_of([prompt] + [response] * 16, [-1] + [0] * 16)
    group, programs = heads // kv_heads, -(-metadata.padded_size // 128) * kv_heads
    undivided = 4 * metadata.padded_size * kv_heads * (128 + 128)
    splits = splits_for(programs, group, processors=132, warps=8, bytes_undivided=undivided)
    assert busy(metadata, heads, kv_heads, splits, 132) >= 0.9
    two_each = next(one for one in range(1, group + 1) if group % one == 0 and programs * one >= 2 * 132)
    assert busy(metadata, heads, kv_heads, two_each, 132) == pytest.approx(with_two_each, abs=0.01)
    assert splits * undivided <= PARTIAL_BYTES


@given(
    programs=st.integers(1, 5000),
    group=st.integers(1, 48),
    processors=st.integers(1, 200),
    warps=st.sampled_from([4, 8]),
    undivided=st.integers(1, PARTIAL_BYTES),
)
def test_a_group_is_divided_as_little_as_fills_the_device(programs, group, processors, warps, undivided):
    splits = splits_for(programs, group, processors=processors, warps=warps, bytes_undivided=undivided)
    assert group % splits == 0
    assert splits * undivided <= PARTIAL_BYTES
    wanted = 8 * processors * (8 // warps)
    fewer, more = (
        [one for one in range(1, group + 1) if group % one == 0 and one * sign > splits * sign] for sign in (-1, 1)
    )
    assert not fewer or programs * fewer[-1] < wanted
    assert not more or programs * splits >= wanted or more[0] * undivided > PARTIAL_BYTES


@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(0, 30),
    lens=st.sampled_from([(0, 1, 3), (1, 57, 64, 130), (200,)]),
    roots=st.sampled_from([0.05, 0.5, 1.0]),
    padding=st.integers(0, 300),
    window=st.sampled_from([None, 1, 2, 40, 100_000]),
    blocks=st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2),
)
def test_every_query_block_has_a_diagonal_tile(seed, nodes, lens, roots, padding, window, blocks):
    """So that no row of a launch is without a key."""
    nodes = random_forest(seed, nodes=nodes, node_lens=lens, root_rate=roots)
    tree = metadata_of(*nodes, padding=padding + (not sum(nodes[0])))
    one = Launch(*blocks, 4, 1)
    configs = Configs(forward=one, key_value=one, query=one, apart=False, engine=False)
    plan = DevicePlan.of(tree, configs, window)
    launched = -(-tree.padded_size // one.query_block)
    for numbers in (plan.schedules[0], plan.schedules[2]):
        first, diagonal_end = numbers[: 2 * launched].view(2, launched)
        assert (first < diagonal_end).all()
        # Every block is launched, and none that is not there.
        assert numbers[4 * launched : 5 * launched].sort().values.tolist() == list(range(launched))
