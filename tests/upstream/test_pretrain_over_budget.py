"""Megatron-LM's own loop with trees and samples above ``--prefix-tree-max-tokens``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.commands import write_rows
from megatron_lm import CPU, ENTRY, LOSS, MODEL, VOCAB, megatron, require_checkout

require_checkout()

TRAIN = (
    "--train-iters 3 --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 1 --adam-eps 1e-3 --log-interval 1 --eval-interval 2 --eval-iters 1 --save-interval 1000 "
    "--ckpt-format torch_dist"
)


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, VOCAB, size=20).tolist()
    rows = [{"tokens": prompt + rng.integers(1, VOCAB, size=30 - at).tolist()} for at in range(24)]
    path = write_rows(tmp_path / "data.jsonl", rows)
    return f"--prefix-tree-data-path {path} --prefix-tree-valid-data-path {path} --prefix-tree"


@pytest.mark.parametrize("stages", [1, 2])
def test_the_loop_does_not_see_the_budget(data: str, stages: int) -> None:
    layout = f"--pipeline-model-parallel-size {stages}"
    wide, cut = (
        megatron(ENTRY, CPU, MODEL, TRAIN, data, layout, f"--prefix-tree-max-tokens {size}", ranks=stages)
        for size in ("1000", "45 --prefix-tree-over-budget carry")
    )
    assert (wide.status, cut.status) == (0, 0), wide.output[-2000:] + cut.output[-2000:]
    assert cut.losses.keys() == wide.losses.keys() == {1, 2, 3}
    for iteration, loss in wide.losses.items():
        assert cut.losses[iteration] == pytest.approx(loss, rel=LOSS), iteration


def test_the_dry_run_names_carried_tokens(data: str) -> None:
    run = megatron(ENTRY, CPU, MODEL, TRAIN, data, "--prefix-tree-max-tokens 45 --prefix-tree-dry-run")
    assert run.status == 0, run.output[-2000:]
    assert "tokens run forward once more" in run.output
    assert "keys and values that chunks read, with their gradients, at most: " in run.output
