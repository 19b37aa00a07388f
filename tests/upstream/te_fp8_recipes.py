"""Recipes in FP8 with TransformerEngine's own layers. Run by test_transformer_engine_layers.py, as te_layers.py is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import te_compiled  # isort: skip  before Megatron-Core
import numpy as np
import pytest
from harness.commands import write_rows
from harness.train_jobs import built, resolved, rows, train, world_of_one, write_job

from mcore_prefix_tree import FlatLayout, fold
from mcore_prefix_tree.mcore.engine import folding
from mcore_prefix_tree.mcore.loop.score_recipe import run_score
from mcore_prefix_tree.settings import Recipe, load_recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig

pytestmark = pytest.mark.filterwarnings("ignore")
RECIPES = ("tensorwise", "blockwise", "mxfp8")
MODEL = (*te_compiled.RECIPE, "model.transformer.fp8=hybrid")


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with te_compiled.in_sessions():
        yield


def recipe_in(folder: Path, recipe: str, *changes: str) -> Recipe:
    return load_recipe(write_job(folder), [*MODEL, f"model.transformer.fp8_recipe={recipe}", *changes])


@pytest.mark.parametrize("recipe", RECIPES)
def test_verify_passes(tmp_path: Path, recipe: str) -> None:
    """By its rule for bf16, whose reference is without FP8."""
    job = recipe_in(tmp_path, recipe)
    assert job.padding.multiple == (32 if recipe == "mxfp8" else 16)
    with world_of_one(job) as place:
        model = built(job, place)
        report = resolved(job, place).verified([model])
        assert model.config.fp8 == "hybrid"
    assert report.passed, report.checks
    assert report.dtype == "bfloat16 with FP8"
    assert report.reference == "the same weights in float32, unfolded"
    assert report.unfolded_errors is not None
    assert report.unfolded_errors["gradient_error"] > 0.2, "FP8's own rounding, which bf16 has not"


def test_verify_sees_a_mistake_below_fp8s_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_token_at_another_position(layout: FlatLayout) -> FlatLayout:
        position = layout.position_ids.copy()
        position[np.argmax(layout.loss_weight > 0)] -= 1
        return replace(layout, position_ids=position)

    monkeypatch.setattr(
        folding, "fold", lambda samples, **options: one_token_at_another_position(fold(samples, **options))
    )
    job = recipe_in(tmp_path, "mxfp8")
    with world_of_one(job) as place:
        report = resolved(job, place).verified([built(job, place)])
    assert not report.passed
    assert report.dtype == "bfloat16"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_trains_evaluates_and_scores(tmp_path: Path, recipe: str) -> None:
    """Trees in chunks and whole: no size of theirs is refused."""
    held_out = write_rows(tmp_path / "held_out.jsonl", rows(1))
    changes = ["optimizer.clip_grad=0", f"validation.path={held_out}", "validation.eval_interval=1", "train_iters=3"]
    changes += ["batch.max_tokens=12", "verify.enabled=true", f"checkpoint.save={tmp_path / 'runs'}"]
    job = recipe_in(tmp_path, recipe, *changes)
    notes = train(job)
    assert len(notes.reports) == 3
    assert all(np.isfinite(loss) for loss in notes.losses)
    assert len({round(one.loss, 6) for one in notes.evaluations}) > 1, "weights in FP8 are made again after a step"
    found = tmp_path / "scores.jsonl"
    run_score(job, ScoreConfig(output=str(found)))
    assert len([json.loads(line) for line in found.read_text().splitlines()]) == len(rows())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.transformer.fp8_recipe=delayed", "fp8_recipe='delayed': only a scale that the quantised numbers"),
        ("model.transformer_impl=local", "fp8='hybrid' in layers that compute without it"),
    ],
)
def test_what_is_not_exact_is_refused(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=said):
        train(recipe_in(tmp_path, "tensorwise", change))
