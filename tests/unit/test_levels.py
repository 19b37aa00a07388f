"""The plan of recurrent layers against each token's own path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.oracles import comb, forest_samples, metadata_of, random_forest
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, TreeMetadata, fold

pytest.importorskip("megatron.core")
from mcore_prefix_tree.mcore.seam.levels import Levels, PathRows

FORESTS = st.builds(
    lambda seed, nodes, padding: metadata_of(
        *random_forest(seed, nodes=nodes, node_lens=(0, 1, 1, 2, 5), root_rate=0.2), padding=padding
    ),
    st.integers(0, 10_000),
    st.integers(1, 20),
    st.integers(1, 3),
)


def paths(metadata: TreeMetadata) -> list[list[int]]:
    """``[P]``: the flat tokens up to each token, itself included; padding is one path."""
    borders = metadata.cu_node_lens.tolist()
    of_nodes: list[list[int]] = []
    found: list[list[int]] = []
    for node, parent in enumerate(metadata.node_parent.tolist()):
        path = list(of_nodes[parent]) if parent >= 0 else []
        for token in range(borders[node], borders[node + 1]):
            path = [*path, token]
            found.append(path)
        of_nodes.append(path)
    padding = range(metadata.num_tokens, metadata.padded_size)
    return [*found, *(list(padding[: n + 1]) for n in range(len(padding)))]


@given(FORESTS)
def test_each_state_comes_from_the_token_before_on_the_path(metadata: TreeMetadata) -> None:
    """A run of the plan whose state is the list of the tokens that it has seen."""
    levels = Levels.of(metadata)
    order, seen = levels.order.tolist(), {}
    states: list[list[int]] = []
    for depth, level in enumerate(levels.levels):
        borders = (level.start + level.cu_lens).tolist()
        assert (borders[-1], len(borders) - 1) == (level.end, len(level.lens))
        assert level.offsets.tolist() == [0, *np.cumsum(-(-level.lens // 64)).tolist()]
        ends = []
        for start, end, parent in zip(borders, borders[1:], level.parent.tolist(), strict=False):
            assert start < end
            state = list(states[parent]) if depth else []
            for token in order[start:end]:
                state.append(token)
                seen[token] = list(state)
            ends.append(state)
        states = ends[: level.kept]
    assert not states
    assert [seen[token] for token in range(metadata.padded_size)] == paths(metadata)
    assert torch.equal(levels.order[levels.inverse], torch.arange(metadata.padded_size))


@given(FORESTS)
def test_all_levels_are_one_row_of_segments(metadata: TreeMetadata) -> None:
    levels, expected = Levels.of(metadata), paths(metadata)
    lens = np.concatenate([level.lens for level in levels.levels])
    assert levels.cu_lens.diff().tolist() == lens.tolist()
    assert levels.chunks.tolist() == [[at, part] for at, size in enumerate(lens) for part in range(-(-size // 64))]
    # The states, as the tokens that each has seen.
    order, states, segment = levels.order.tolist(), [[]], 0
    for level in levels.levels:
        ends = (levels.cu_lens[segment + 1 :][: level.kept] - 1).tolist()
        states += [expected[order[end]] for end in ends]
        segment += len(level.lens)
    for start, state in zip(levels.first.tolist(), levels.first_state.tolist(), strict=True):
        assert states[state] == expected[order[start]][:-1]


@given(FORESTS, st.integers(1, 5))
def test_each_window_has_the_tokens_before_on_the_path(metadata: TreeMetadata, width: int) -> None:
    rows, nothing = PathRows.of(metadata, width), metadata.padded_size
    tokens = rows.tokens.tolist()
    order = metadata.derived("levels", Levels.of).order.tolist()
    expected = paths(metadata)
    for place, token in zip(rows.own.tolist(), order, strict=True):
        window = [nothing] * (width - 1) + expected[token]
        assert tokens[place - width + 1 : place + 1] == window[-width:]


def test_only_branch_points_keep_a_state() -> None:
    """A sample that ends inside a path, or repeats one, makes no level."""
    samples = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2], [1, 2, 3], [7]]
    metadata = TreeMetadata.from_layout(fold([Sample(tokens=tokens) for tokens in samples]))
    levels = Levels.of(metadata)
    assert [(level.kept, level.lens.tolist()) for level in levels.levels] == [(1, [4, 1]), (0, [1, 1])]


def test_deep_trees_are_planned_in_linear_time() -> None:
    levels = Levels.of(TreeMetadata.from_layout(fold(comb(500))))
    assert len(levels.levels) == 500
    assert sum(level.kept for level in levels.levels) == 499


def test_plans_move_with_the_metadata() -> None:
    metadata = TreeMetadata.from_layout(fold(forest_samples([2, 1, 1], [-1, 0, 0])))
    metadata.derived("levels", Levels.of)
    moved = metadata.with_plans_on("meta").cache["levels"]
    assert {moved.order.device.type, moved.levels[1].cu_lens.device.type} == {"meta"}
    assert isinstance(moved.host_order, np.ndarray)
