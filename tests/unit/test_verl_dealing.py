"""Dealing the rows of verl's step: every row once, as many rows for each rank, and groups in one piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.integrations.verl.dealing import Group, deal_groups, group_rows
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.sample import Sample


def rows_of(sizes: list[int], seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Rows of groups of these sizes in a random order, and their groups."""
    rng = np.random.default_rng(seed)
    rows, keys = [], []
    for key, size in enumerate(sizes):
        prompt, stem = [key, *rng.integers(50, size=rng.integers(1, 30))], rng.integers(50, size=5)
        for row in range(size):
            answer = rng.integers(50, size=rng.integers(1, 12))
            rows.append(np.concatenate([prompt, *([stem] if row % 2 else []), answer]).astype(np.int32))
            keys.append(key)
    order = rng.permutation(len(rows))
    return [rows[index] for index in order], [keys[index] for index in order]


def unique_tokens(rows: list[np.ndarray], chosen: tuple[int, ...]) -> int:
    return fold([Sample(tokens=rows[row]) for row in chosen]).physical_tokens


def pieces(dealt: list[list[list[Group]]]) -> list[Group]:
    return [group for rank in dealt for step in rank for group in step]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_each_row_once_and_ranks_of_a_size(sizes: list[int], ranks: int, updates: int, seed: int) -> None:
    sizes = [*sizes, -sum(sizes) % (ranks * updates)]  # as verl's padding
    rows, keys = rows_of(sizes, seed)
    dealt = deal_groups(group_rows(rows, keys), ranks=ranks, mini_batches=updates)
    counts = [[sum(len(group.rows) for group in step) for step in rank] for rank in dealt]
    assert counts == [[len(rows) // (ranks * updates)] * updates] * ranks
    assert sorted(row for group in pieces(dealt) for row in group.rows) == list(range(len(rows)))
    for group in pieces(dealt):
        assert len({keys[row] for row in group.rows}) == 1
        assert group.unique_tokens == unique_tokens(rows, group.rows)


@pytest.mark.parametrize(("ranks", "updates"), [(4, 1), (4, 2), (8, 2), (2, 8)])
def test_groups_that_fit_are_not_cut(ranks: int, updates: int) -> None:
    rows, keys = rows_of([6] * 32)
    dealt = deal_groups(group_rows(rows, keys), ranks=ranks, mini_batches=updates)
    assert sorted({keys[group.rows[0]] for group in pieces(dealt)}) == list(range(32))
    assert len(pieces(dealt)) == 32
    for step in range(updates):
        loads = [sum(group.unique_tokens for group in rank[step]) for rank in dealt]
        assert max(loads) <= 1.15 * sum(loads) / ranks


def test_a_group_larger_than_a_rank_is_cut_once() -> None:
    rows, keys = rows_of([8] * 2)
    dealt = deal_groups(group_rows(rows, keys), ranks=4, mini_batches=1)
    assert [len(group.rows) for group in pieces(dealt)] == [4] * 4
    assert sorted(keys[group.rows[0]] for group in pieces(dealt)) == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", [1, 3, 5])  # without exchanges, 5%, 16% and 8% above the mean
def test_rank_of_a_long_group_gets_short_ones_in_other_mini_batches(seed: int) -> None:
    """Two groups for each rank in each mini-batch: a long one fills its rank there, but not in total."""
    rng = np.random.default_rng(seed)
    lengths = (1000 * rng.lognormal(0, 0.4, size=64)).astype(np.int64)
    groups = [Group((row,), lengths[[row]], np.zeros(1, dtype=np.int64)) for row in range(64)]
    dealt = deal_groups(groups, ranks=8, mini_batches=4)
    loads = np.array([[sum(group.unique_tokens for group in step) for step in rank] for rank in dealt])
    assert loads.sum(axis=1).max() <= 1.01 * loads.sum() / 8
    assert sorted(group.rows for group in pieces(dealt)) == [(row,) for row in range(64)]
