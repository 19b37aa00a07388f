"""Data that TensorBoard and Weights & Biases get through Megatron's own writers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from megatron_lm import ENTRY, LOSS, Stock, require_checkout, trained

require_checkout()
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

FIRST_STEP = ("lm loss", "fold ratio", "plan time (ms)")
FIGURES = (*FIRST_STEP, "logical tokens/s", "physical tokens/s")
# Weights & Biases itself brings some forty packages; Megatron calls three of its functions.
FAKE_WANDB = """
import json, os

config = {}

def init(**settings):
    print("fake wandb:", settings["project"], settings["name"])

def log(values, step):
    with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
        file.write(json.dumps([step, {name: float(value) for name, value in values.items()}]) + "\\n")

def finish():
    print("fake wandb: finished")
"""


def test_both_get_the_figures_of_the_log_line(
    stock: Stock, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE_WANDB)
    paths = [str(tmp_path / "fake"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setenv("FAKE_WANDB_LOG", str(tmp_path / "wandb.jsonl"))
    writers = f"--tensorboard-dir {tmp_path / 'board'} --wandb-project trees --wandb-exp-name one"
    *arguments, save = stock.args(tmp_path / "saved")
    assert save.startswith("--save")
    folder = f"--wandb-save-dir {tmp_path} --load {base} --exit-interval 5"
    run = trained(ENTRY, *arguments, writers, folder, fork=False)
    assert "fake wandb: trees one" in run.output

    board = event_accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    wandb: dict[str, dict[int, float]] = {}
    for step, values in map(json.loads, (tmp_path / "wandb.jsonl").read_text().splitlines()):
        for name, value in values.items():
            wandb.setdefault(name, {})[step] = value
    for name in FIGURES:
        scalars = {scalar.step: scalar.value for scalar in board.Scalars(name)}
        # Nothing is measured before the first step of a process, which is the second of the run.
        assert sorted(scalars) == sorted(wandb[name]) == list(range(2 if name in FIRST_STEP else 3, 6)), name
        for step in (4, 5):
            assert scalars[step] == pytest.approx(run.iterations[step][name], rel=1e-5), name
            assert wandb[name][step] == pytest.approx(scalars[step], rel=1e-5), name
    for step in (3, 4, 5):  # throughput is that of the step before
        ratio = wandb["logical tokens/s"][step] / wandb["physical tokens/s"][step]
        assert ratio == pytest.approx(wandb["fold ratio"][step - 1], rel=1e-5)
    assert wandb["lm loss"][5] == pytest.approx(stock.losses[5], rel=LOSS)
