"""Recipes of models that predict several tokens: trained, verified, scored, and refused where that is not exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.train_jobs import FLOAT64, train, write_job

from mcore_prefix_tree.mcore.loop.score_recipe import run_score
from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS
from mcore_prefix_tree.settings import RecipeError, load_recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig

pytestmark = pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}")

DEPTHS = ("model.transformer.mtp_num_layers=2", "model.transformer.mtp_loss_scaling_factor=0.5")
VERIFY = ("verify.enabled=true", "train_iters=2")


HYBRID = "model.hybrid_layer_pattern=*-/*-/*-"


@pytest.mark.parametrize("pattern", [(), (HYBRID,)], ids=["gpt", "hybrid"])
def test_verify_compares_the_depths(tmp_path: Path, pattern: tuple[str, ...]) -> None:
    notes = train(write_job(tmp_path), *DEPTHS, *FLOAT64, *VERIFY, *pattern)
    (report,) = notes.verifications
    assert report.passed
    assert max(error for error, _ in report.checks.values()) < 1e-6
    for step in notes.reports:
        # A model that knows nothing: the logarithm of the vocabulary.
        assert {name for name in step.metrics if name.startswith("mtp")} == {"mtp_1 loss", "mtp_2 loss"}
        assert step.metrics["mtp_2 loss"] == pytest.approx(4.16, abs=0.3)


def test_depths_are_trained(tmp_path: Path) -> None:
    notes = train(write_job(tmp_path), *DEPTHS, "train_iters=8", "compare=true")
    losses = [step.metrics["mtp_1 loss"] for step in notes.reports]
    assert losses[-1] < losses[0] - 0.05
    assert len(notes.comparisons) == 1


@pytest.mark.parametrize(("factor", "trains"), [(0.5, True), (0, False)])
def test_other_objectives_train_the_depths_unless_the_factor_is_0(tmp_path: Path, factor: float, trains: bool) -> None:
    job = write_job(tmp_path)
    options = (*DEPTHS, *FLOAT64, *VERIFY, "objective.options.normalise=sample")
    notes = train(job, *options, f"model.transformer.mtp_loss_scaling_factor={factor}")
    (report,) = notes.verifications
    assert report.passed
    assert max(error for error, _ in report.checks.values()) < 1e-6
    names = {name for step in notes.reports for name in step.metrics if name.startswith("mtp")}
    assert names == ({"mtp_1 loss", "mtp_2 loss"} if trains else set())


@pytest.mark.parametrize(
    ("pattern", "depths", "says"),
    [
        ("*-/*-/*-", (), "has 2 depths of multi-token prediction behind /"),
        ("*-/*-", DEPTHS, "has 1 depths .* and model.transformer.mtp_num_layers is 2"),
        ("*-/*-/-*", DEPTHS, "which have to have the same layers"),
        ("*-/*X/*X", DEPTHS, "has the letter X"),
    ],
)
def test_depths_of_a_pattern_have_to_fit(tmp_path: Path, pattern: str, depths: tuple[str, ...], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(write_job(tmp_path), [f"model.hybrid_layer_pattern={pattern}", *depths])


@pytest.mark.parametrize("pattern", [(), (HYBRID,)], ids=["gpt", "hybrid"])
def test_checkpoint_with_depths_is_resumed_and_scored(tmp_path: Path, pattern: tuple[str, ...]) -> None:
    options = (*DEPTHS, *FLOAT64, *pattern)
    whole = train(write_job(tmp_path), *options, "train_iters=4").losses
    saving = (*options, f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=2")
    job = write_job(tmp_path)
    train(job, *saving, "train_iters=4", stop_after=3)
    assert train(job, *saving, "train_iters=4", resume=True).losses == pytest.approx(whole[2:], rel=1e-12)
    run_score(load_recipe(job, [*saving]), ScoreConfig(output=str(tmp_path / "scores.jsonl")))
    scored = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert len(scored) == 16
