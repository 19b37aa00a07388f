"""Megatron-LM's own loop with trees and samples above ``--prefix-tree-max-tokens``."""

from __future__ import annotations

import json
import re
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
    assert_same_tensors,
    megatron,
    objective_words,
    require_checkout,
    runs_ahead,
    trained,
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


LAYOUTS = {
    "single": (1, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2 --overlap-grad-reduce"),
}
CUT = [
    ("gspo", "pp2"),
    pytest.param("dpo", "single", marks=pytest.mark.ci),
    pytest.param("dpo", "pp2-vpp2", marks=pytest.mark.ci),
    *(pytest.param(name, "tp2-pp2", marks=pytest.mark.slow) for name in ("gspo", "dpo")),
    pytest.param("dpo", "pp2-dp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "layout"), CUT)
def test_losses_of_whole_samples_do_not_see_the_budget(tmp_path: Path, name: str, layout: str) -> None:
    """In training and in evaluation, from the weights after a step of one process."""
    path, trains = tmp_path / "rollouts.jsonl", SIXTEEN.replace("--train-iters 20", "--train-iters 6")
    write_rollouts(path)
    words = f"{objective_words(path, name)} --prefix-tree-valid-data-path {path} --prefix-tree --micro-batch-size 1"
    evaluates = trains.replace("--eval-interval 1000", "--eval-interval 3") + " --eval-iters 2"
    wide, carrying = "--prefix-tree-max-tokens 1000", "--prefix-tree-max-tokens 24 --prefix-tree-over-budget carry"
    base, *saved = (tmp_path / folder for folder in ("base", "wide", "cut"))
    trained(ENTRY, CPU, MODEL, trains, words, wide, f"--eval-iters 0 --save {base} --exit-interval 1")
    ranks, parallel = LAYOUTS[layout]
    if parallel and not runs_ahead():
        run = megatron(ENTRY, CPU, MODEL, trains, words, carrying, parallel, ranks=ranks)
        assert run.status == 2
        assert "with Megatron-LM core_v0.19.0 or later" in run.output
        return
    expected, actual = (
        trained(ENTRY, CPU, MODEL, evaluates, words, f"--load {base} --save {folder}", way, ranks=size)
        for folder, way, size in zip(saved, (wide, f"{carrying} {parallel}"), (1, ranks), strict=True)
    )
    assert actual.iterations.keys() == expected.iterations.keys() == set(range(2, 7))
    for iteration, figures in expected.iterations.items():
        for figure in figures.keys() & {"lm loss", "ratio", "clip_fraction", "accuracy", "margin"}:
            found = actual.iterations[iteration][figure]
            assert found == pytest.approx(figures[figure], rel=LOSS, abs=1e-7), iteration
    for iteration in (3, 6):
        losses = [run.validation_loss(iteration) for run in (actual, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=LOSS, abs=1e-7)
    assert_same_tensors(*reversed(saved), 6)


@pytest.mark.skipif(not runs_ahead(), reason="pipeline stages run no pass before a step")
def test_groups_that_leave_a_rest_are_refused(tmp_path: Path) -> None:
    path, layout = tmp_path / "rollouts.jsonl", LAYOUTS["pp2-vpp2"][1]
    write_rollouts(path)
    carrying = "--prefix-tree --micro-batch-size 1 --prefix-tree-max-tokens 24 --prefix-tree-over-budget carry"
    words = (objective_words(path, "dpo"), carrying, layout, "--prefix-tree-dry-run")
    assert megatron(ENTRY, CPU, MODEL, SIXTEEN, *words, ranks=2).status == 0
    run = megatron(ENTRY, CPU, MODEL, SIXTEEN, *words, "--microbatch-group-size-per-virtual-pipeline-stage 4", ranks=2)
    assert run.status == 2
    assert "virtual ones without --microbatch-group-size-per-virtual-pipeline-stage" in run.output


def test_scores_do_not_see_the_budget(data: str, tmp_path: Path) -> None:
    saved, read = tmp_path / "saved", re.sub(r"--prefix-tree-valid-data-path \S+", "", data)
    trained(ENTRY, CPU, MODEL, TRAIN, data, f"--prefix-tree-max-tokens 1000 --save {saved} --exit-interval 1")
    found = []
    for size in (1000, 24):
        output = tmp_path / f"{size}.jsonl"
        scoring = f"--prefix-tree-max-tokens {size} --load {saved} --prefix-tree-score {output}"
        trained(ENTRY, CPU, MODEL, TRAIN, read, scoring, "--pipeline-model-parallel-size 2", ranks=2)
        found.append([json.loads(line)["old_logprobs"] for line in output.read_text().splitlines()])
    wide, cut = (np.array([score for row in rows for score in row[1:]], dtype=float) for rows in found)
    np.testing.assert_allclose(cut, wide, rtol=1e-5)
