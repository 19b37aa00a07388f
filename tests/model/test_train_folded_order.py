"""Training with steps made for folding, ``data.order=folded``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.commands import write_rows
from harness.train_jobs import BATCH, FLOAT64, assert_resumes, batch_of, rows, train

from mcore_prefix_tree.settings import RecipeError, load_recipe

FOLDED = "data.order=folded"
# Steps of 6 that take 16 samples three times, under weights that do not change.
EPOCHS = 3
STEPS = EPOCHS * 16 // BATCH
FROZEN = (*FLOAT64, "optimizer.lr=1e-300", "optimizer.min_lr=0", "optimizer.weight_decay=0", f"train_iters={STEPS}")


def test_epochs_have_the_loss_of_the_data_in_any_order(job: Path, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", rows(seed=1))
    runs = {}
    for order in ("shuffled", "folded", "file"):
        overrides = (*FROZEN, f"data.order={order}", f"validation.path={held_out}")
        recipe, notes = load_recipe(job, overrides), train(job, *overrides)
        scored = [
            sum(int(np.count_nonzero(sample.loss_mask[1:])) for sample in batch_of(recipe, step))
            for step in range(1, STEPS + 1)
        ]
        runs[order] = {
            "loss": sum(loss * count for loss, count in zip(notes.losses, scored, strict=True)),
            "validation": notes.evaluations[0].loss,
        }
        tokens = EPOCHS * sum(len(row["tokens"]) for row in rows())
        assert sum(report.logical_tokens for report in notes.reports) == tokens
        runs[order]["ratio"] = tokens / sum(report.physical_tokens for report in notes.reports)
    for order in ("folded", "file"):
        assert runs[order]["loss"] == pytest.approx(runs["shuffled"]["loss"], rel=1e-12)
        assert runs[order]["validation"] == pytest.approx(runs["shuffled"]["validation"], rel=1e-12)
    assert runs["folded"]["ratio"] > 1.1 * runs["shuffled"]["ratio"]


def test_folded_run_resumes_with_the_same_bits(job: Path, tmp_path: Path) -> None:
    assert_resumes(job, tmp_path, FOLDED, stop_after=5, interval=2)
    with pytest.raises(RecipeError, match="was written with order=folded, this run has order=shuffled"):
        train(job, f"checkpoint.save={tmp_path / 'cut'}", "data.order=shuffled", "train_iters=9", resume=True)


def test_streamed_samples_are_not_sorted(job: Path) -> None:
    with pytest.raises(
        RecipeError, match=r": data.order=folded sorts all samples in memory and needs data.streaming=false"
    ):
        load_recipe(job, [FOLDED, "data.streaming=true"])
