"""Groups as agents make them, excluded members, and files without a scored token, in Megatron-LM's own job."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.commands import write_rows
from megatron_lm import BATCH, CPU, ENTRY, FOLDED, MODEL, TRAIN, megatron, require_checkout

require_checkout(trains=False)  # a dry run ends before

WAY_OUT = "give samples with an assistant turn, or with a 'loss_mask' that is above 0 behind the first token"
DRY = "--prefix-tree-dry-run"


@pytest.mark.parametrize("more", ["", "--prefix-tree-streaming"])
def test_files_without_a_scored_token(tmp_path: Path, more: str) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [{"tokens": [1, 2], "loss_mask": [1, 0]}] * BATCH)
    good = write_rows(tmp_path / "good.jsonl", [{"tokens": [1, 2, 3]}] * BATCH)
    for files, setting in (
        (f"--prefix-tree-data-path {bad}", "--prefix-tree-data-path"),
        (
            f"--prefix-tree-data-path {good} --prefix-tree-valid-data-path {bad} --eval-iters 1",
            "--prefix-tree-valid-data-path",
        ),
    ):
        run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, files, more, DRY)
        (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
        assert line == f"error: {bad}: no token is scored, so {setting} has no loss; {WAY_OUT}"
        assert run.status == 2


@pytest.mark.parametrize("more", ["", "--prefix-tree-streaming"])
def test_subagents_and_excluded_members(tmp_path: Path, more: str) -> None:
    """Groups of one size, line by line in turn; the excluded record would make one of them larger."""
    groups = BATCH // 2
    rows = [
        {
            "tokens": [group, 5, 6],
            "loss_mask": [0, 0, 1],
            "group": group,
            "rollout": rollout,
            "turn": 0,
            "reward": rollout,
        }
        | ({"tokens": [40 + group, 7], "loss_mask": [0, 1], "turn": 1} if turn else {})
        for turn in range(2)
        for rollout in range(2)
        for group in range(1, groups + 1)
    ]
    data = write_rows(tmp_path / "agents.jsonl", [*rows, {"tokens": [], "group": 1, "exclude": True}])
    objective = '--prefix-tree-objective grpo --prefix-tree-objective-options {"on_policy":true}'
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, f"--prefix-tree-data-path {data}", objective, more, DRY)
    assert run.status == 0, run.output
    assert "> excluded 1 by the field 'exclude'" in run.output
