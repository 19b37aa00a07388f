"""Attention whose layers differ, for example Gemma 3's, as Megatron-Bridge gives it to Megatron-Core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.seam.core_attention import layer_window, rows_by_position
from mcore_prefix_tree.metadata import TreeMetadata

GEMMA = SimpleNamespace(window_size=4, interleaved_attn_pattern=(5, 1))
PAIR = SimpleNamespace(window_size=(3, 0), window_attn_skip_freq=[1, 0])


@pytest.mark.parametrize(
    ("config", "windows"), [(GEMMA, [4] * 5 + [None] + [4] * 5 + [None]), (PAIR, [4, None])], ids=["number", "pair"]
)
def test_windows_of_layers(config: SimpleNamespace, windows: list[int | None]) -> None:
    assert [layer_window(config, layer) for layer in range(1, len(windows) + 1)] == windows


@pytest.mark.parametrize("stacked", [False, True])
def test_tables_are_gathered_by_position(stacked: bool) -> None:
    metadata = TreeMetadata.from_layout(fold([Sample(tokens=[1, 2, 3, 4]), Sample(tokens=[1, 2, 5])]))
    tables = torch.randn(2, 4, 1, 1, 6) if stacked else torch.randn(4, 1, 1, 6)
    rows = rows_by_position(tables, metadata)
    positions = metadata.tree_position_ids.tolist()
    for row, position in enumerate(positions):
        assert torch.equal(rows[..., row, 0, 0, :], tables[..., position, 0, 0, :])
    assert sorted(positions[:5]) == [0, 1, 2, 2, 3]


def test_stack_of_short_tables_is_rejected() -> None:
    """Two tables are not two positions."""
    metadata = TreeMetadata.from_layout(fold([Sample(tokens=[1, 2, 3])]))
    with pytest.raises(ValueError, match="the rotary table has 2 positions but the longest path has 3"):
        rows_by_position(torch.randn(3, 2, 1, 1, 6), metadata)
