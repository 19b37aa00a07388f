"""Megatron-LM's own loop with trees and samples above ``--prefix-tree-max-tokens``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.commands import write_rows
from megatron_lm import (
    CPU,
    ENTRY,
    LOSS,
    MODEL,
    VOCAB,
    megatron,
    objective_words,
    require_checkout,
    write_rollouts,
)
from megatron_lm import TRAIN as SIXTEEN

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


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
)


@pytest.mark.parametrize(("stages", "experts"), [(1, ""), (2, ""), (2, EXPERTS)])
def test_the_loop_does_not_see_the_budget(data: str, stages: int, experts: str) -> None:
    layout = f"--pipeline-model-parallel-size {stages} {experts}"
    wide, cut = (
        megatron(ENTRY, CPU, MODEL, TRAIN, data, layout, f"--prefix-tree-max-tokens {size}", ranks=stages)
        for size in ("1000", "45 --prefix-tree-over-budget carry")
    )
    assert (wide.status, cut.status) == (0, 0), wide.output[-2000:] + cut.output[-2000:]
    assert cut.losses.keys() == wide.losses.keys() == {1, 2, 3}
    for iteration, loss in wide.losses.items():
        assert cut.losses[iteration] == pytest.approx(loss, rel=LOSS), iteration


@pytest.mark.parametrize("name", ["gspo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_losses_of_whole_samples_do_not_see_the_budget(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path)
    words, folded = objective_words(path, name), "--prefix-tree --micro-batch-size 1 --prefix-tree-max-tokens"
    wide, cut, pipeline = (
        megatron(ENTRY, CPU, MODEL, SIXTEEN, words, f"{folded} {size}", ranks=ranks)
        for size, ranks in (
            ("1000", 1),
            ("24 --prefix-tree-over-budget carry", 1),
            ("24 --prefix-tree-over-budget carry --pipeline-model-parallel-size 2", 2),
        )
    )
    assert (wide.status, cut.status) == (0, 0), wide.output[-2000:] + cut.output[-2000:]
    assert wide.iterations.keys() == cut.iterations.keys()
    for iteration, figures in wide.iterations.items():
        for figure in figures.keys() & {"lm loss", "ratio", "clip_fraction", "accuracy", "margin"}:
            assert cut.iterations[iteration][figure] == pytest.approx(figures[figure], rel=LOSS, abs=1e-7), iteration
    assert pipeline.status == 2
    assert "needs a pass before the step, for which Megatron-LM's pipelines have no place" in pipeline.output


def test_the_dry_run_names_carried_tokens(data: str) -> None:
    run = megatron(ENTRY, CPU, MODEL, TRAIN, data, "--prefix-tree-max-tokens 45 --prefix-tree-dry-run")
    assert run.status == 0, run.output[-2000:]
    assert "tokens run forward once more" in run.output
    assert "keys, values and states that chunks read, with their gradients, at most: " in run.output
