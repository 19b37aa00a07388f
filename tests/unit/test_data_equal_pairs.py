"""Pairs whose two answers are equal are named, however the data writes them, once for each file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.commands import write_rows

from mcore_prefix_tree.data import LineOptions
from mcore_prefix_tree.data.grouping import EqualPairs
from mcore_prefix_tree.data.source import Source
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import Signals
from mcore_prefix_tree.utils.ranks import Ranks


def row(pair: str, chosen: bool, tokens: list[int], mask: list[int] | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "pair": pair, "chosen": chosen} | ({} if mask is None else {"loss_mask": mask})


ROWS = [
    row("a", True, [1, 2, 3]),
    row("b", True, [1, 4]),
    row("a", False, [1, 2, 3]),
    row("b", False, [1, 5]),
    row("c", True, [1, 2], [0, 1]),
    row("c", False, [1, 2], [0, 1]),
    row("d", True, [1, 2, 3], [0, 0, 1]),
    row("d", False, [1, 2, 3], [0, 1, 1]),
]


def source(path: Path, **settings: Any) -> Source:
    given = {"paths": [str(path)], "options": LineOptions(), "seed": 1, "order": "file", "step": 2}
    return Source(**(given | {"grouped_by": "pair"} | settings))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_equal_answers_are_counted_for_each_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", ROWS)
    source(path, is_streamed=is_streamed).read()
    assert caplog.messages == [
        f"{path}: 2 pairs have two equal answers each, which teach no preference; remove them (the first: {path}:1)"
    ]


def test_equal_pairs_in_held_out_data_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", ROWS[:4])
    source(path, grouped_by=None).held_out([str(path)], "pair", lambda samples: None, setting="validation.path")
    assert caplog.messages == [
        f"{path}: 1 pair has two equal answers, which teach no preference; remove them (the first: {path}:1)"
    ]


def test_other_units_and_other_ranks_are_quiet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", ROWS)
    source(path, grouped_by=None).read()
    monkeypatch.setenv("RANK", "1")
    source(path).read()
    assert caplog.messages == []


def test_pair_on_several_ranks_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    pairs = EqualPairs(ranks=Ranks(size=2, gather=lambda found: [found, found]))
    sides = [
        Sample(tokens=[1, 2], source=f"d row {number}", signals=Signals(pair="p", chosen=not number))
        for number in range(2)
    ]
    pairs.noting(None)(sides)
    pairs.warn()
    assert caplog.messages == [
        "d: 1 pair has two equal answers, which teach no preference; remove them (the first: d row 0)"
    ]
