"""Micro-batches for verl: rows that share a prefix meet, no rank waits for another, and no micro-batch is empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.worlds import Layout, world

from mcore_prefix_tree.integrations.verl.micro_batches import cut
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.sample import Sample


def rows_of(groups: int, rollouts: int, *, prompt: int = 20, answer: int = 5) -> list[torch.Tensor]:
    """Rollouts of each prompt, far from each other in the batch."""
    return [
        torch.tensor([group] * prompt + [100 + rollout] * answer)
        for rollout in range(rollouts)
        for group in range(groups)
    ]


def unique(rows: list[torch.Tensor], part: list[int]) -> int:
    return fold([Sample(tokens=rows[index].numpy()) for index in part]).physical_tokens


def test_rows_of_a_prompt_meet_under_a_budget_of_unique_tokens() -> None:
    rows = rows_of(3, 4)
    parts = cut(rows, max_tokens=40)
    assert parts == [[group, group + 3, group + 6, group + 9] for group in (part[0] for part in parts)]
    assert [unique(rows, part) for part in parts] == [40, 40, 40]


def test_forced_groups_stay_in_one_piece_and_in_order() -> None:
    parts = cut(rows_of(3, 4), max_tokens=60, group_size=2)
    assert sorted(index for part in parts for index in part) == list(range(12))
    for part in parts:
        assert all(first % 2 == 0 and second == first + 1 for first, second in zip(part[::2], part[1::2], strict=True))


def test_small_micro_batches_fill_and_drain_the_pipeline() -> None:
    rows = [torch.tensor([group] * (10 * group + 10)) for group in range(6)]
    sizes = [unique(rows, part) for part in cut(rows, max_tokens=60, multiple=6)]
    assert sizes == [10, 30, 50, 60, 40, 20]


def test_micro_batch_has_only_the_nodes_of_its_rows() -> None:
    """The tree that verl's draft prunes from that of the full batch: distinct prefixes of the rows, by definition."""
    rows = [*rows_of(3, 4), torch.tensor([0] * 20), torch.tensor([0] * 20 + [100] * 5 + [7])]
    parts = cut(rows, max_tokens=50)
    assert len(parts) > 1
    for part in parts:
        kept = [rows[index].tolist() for index in part]
        prefixes = {tuple(row[:end]) for row in kept for end in range(1, len(row) + 1)}
        assert unique(rows, part) == len(prefixes) <= 50


@pytest.mark.parametrize("multiple", [1, 4])
def test_no_micro_batch_of_equal_rows_is_empty(multiple: int) -> None:
    parts = cut([torch.arange(9)] * 5, max_tokens=9, multiple=multiple)
    assert len(parts) == multiple
    assert sorted(index for part in parts for index in part) == list(range(5))
    assert all(parts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 24}, "row 0: 25 tokens do not fit.*max_token_len_per_gpu=24"),
        ({"max_tokens": 100, "group_size": 5}, "12 rows are not a multiple of force_group_size=5"),
        ({"max_tokens": 100, "multiple": 16}, "only 12 rows"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(rows_of(3, 4), **arguments)


def on_a_rank(short: bool) -> int | str:
    """The second rank shares nothing, and if not ``short`` one of its rows exceeds the budget."""
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    long = 30 if short else 50
    rows = rows_of(2, 4) if rank == 0 else [torch.full((long,), index) for index in range(8)]
    try:
        return len(cut(rows, max_tokens=40, group=group))
    except ValueError as error:
        return str(error)


def test_ranks_agree_on_the_number() -> None:
    assert world(2).run(on_a_rank, True, layout=Layout()) == [8, 8]


def test_ranks_refuse_together() -> None:
    first, second = world(2).run(on_a_rank, False, layout=Layout())
    assert "on another rank" in str(first)
    assert "50 tokens do not fit" in str(second)
