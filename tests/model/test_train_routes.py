"""Recipes whose data say which experts each token went to: trained, verified, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.commands import run_command
from harness.groups import threads
from harness.routes import with_routes
from harness.train_jobs import FLOAT64, rows, train, write_job

from mcore_prefix_tree import Sample, SampleError
from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.mcore.loop.jobs import VerificationError
from mcore_prefix_tree.mcore.loop.score_recipe import run_score
from mcore_prefix_tree.settings import RecipeError, load_recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig

EXPERTS = ("model.transformer.num_moe_experts=4", "model.transformer.moe_router_load_balancing_type=none")
SHAPE = (2, 2, 4)
VERIFY = ("verify.enabled=true", "train_iters=2")


def routed_rows(kind: str = "one token", shape: tuple[int, int, int] = SHAPE) -> list[dict[str, Any]]:
    plain = rows()
    samples = with_routes([Sample(tokens=row["tokens"]) for row in plain], kind, shape)
    return [
        row if one.signals.routes is None else {**row, "routed_experts": one.signals.routes.ids.tolist()}
        for row, one in zip(plain, samples, strict=True)
    ]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, routed_rows())


@pytest.mark.parametrize("kind", ["one token", "missing"])
def test_verify_replays_the_routes_of_each_sample(tmp_path: Path, kind: str) -> None:
    notes = train(write_job(tmp_path, routed_rows(kind)), *EXPERTS, *FLOAT64, *VERIFY)
    (report,) = notes.verifications
    assert report.passed
    assert max(error for error, _ in report.checks.values()) < 1e-6


def test_routes_change_what_is_trained(job: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    unrouted = train(write_job(tmp_path / "plain"), *EXPERTS, *FLOAT64).losses
    assert abs(train(job, *EXPERTS, *FLOAT64).losses[0] - unrouted[0]) > 1e-6


def test_jobs_share_the_threads_of_their_groups(job: Path) -> None:
    """Sixty of each job would slow every test that follows."""
    before = threads()
    train(job, *EXPERTS, *FLOAT64, *VERIFY)
    assert threads() < before + 10


def test_the_first_samples_routes_are_not_exact(job: Path) -> None:
    with pytest.raises(VerificationError):
        train(job, *EXPERTS, *FLOAT64, *VERIFY, "batch.use_first_samples_routes=true")


@pytest.mark.parametrize(
    "recompute",
    [
        ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"),
        ("recompute_granularity=selective", "recompute_modules=[moe]"),
    ],
    ids=["layers", "experts"],
)
def test_verify_recomputes_the_stock_model_with_its_routes(job: Path, recompute: tuple[str, ...]) -> None:
    notes = train(job, *EXPERTS, *FLOAT64, *VERIFY, *(f"model.transformer.{one}" for one in recompute))
    (report,) = notes.verifications
    assert report.passed
    assert max(error for error, _ in report.checks.values()) < 1e-6


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((3, 2, 4), r"has routes of 3 layers, but the model has 2 \(num_layers\), 2 of them with experts"),
        ((2, 1, 4), r"has 1 experts for a token and layer, but the model chooses 2 \(moe_router_topk\)"),
        ((2, 2, 9), r"has expert 8, but the model has 4 \(num_moe_experts\)"),
    ],
)
def test_routes_of_another_model_name_the_line(tmp_path: Path, shape: tuple[int, int, int], says: str) -> None:
    with pytest.raises(SampleError, match=rf"data\.jsonl:\d+: field 'routed_experts' {says}"):
        train(write_job(tmp_path, routed_rows("agree", shape)), *EXPERTS)


def test_a_critic_refuses_the_policys_routes(job: Path) -> None:
    with pytest.raises(SampleError, match=r"data\.jsonl:\d+: field 'routed_experts' names .* but a critic is another"):
        train(job, *EXPERTS, "objective.name=critic", "objective.options={returns: given, clip_eps: null}")


def test_recorded_routes_are_data_to_train_on(tmp_path: Path) -> None:
    """They are the model's own: with them it gives the same scores, and samples share as much as without."""
    recipe = write_job(tmp_path)
    saving = f"checkpoint.save={tmp_path / 'runs'}"
    train(recipe, *EXPERTS, *FLOAT64, saving, "train_iters=2")
    first, again = tmp_path / "routed.jsonl", tmp_path / "again.jsonl"
    report, _ = run_score(
        load_recipe(recipe, [*EXPERTS, *FLOAT64, saving]), ScoreConfig(output=str(first), record_routes=True)
    )
    routed = load_recipe(recipe, [*EXPERTS, *FLOAT64, saving, f"data.path={first}"])
    report_again, _ = run_score(routed, ScoreConfig(output=str(again)))
    assert report_again.physical_tokens == report.physical_tokens
    for one, other in zip(read_samples(first), read_samples(again), strict=True):
        assert one.signals.routes is not None
        assert other.signals.routes is not None
        assert np.array_equal(one.signals.routes.ids, other.signals.routes.ids)
        assert one.signals.routes.ids.shape[1:] == SHAPE[:2]
        np.testing.assert_allclose(one.signals.old_logprobs, other.signals.old_logprobs, rtol=1e-6)


@pytest.mark.parametrize(
    "pattern", [(), ("model.hybrid_layer_pattern=*E/*E", "model.num_layers=2")], ids=["gpt", "hybrid"]
)
def test_depths_with_experts_record_no_routes(tmp_path: Path, pattern: tuple[str, ...]) -> None:
    options = (
        *EXPERTS,
        *FLOAT64,
        "model.transformer.mtp_num_layers=1",
        *pattern,
        f"checkpoint.save={tmp_path / 'runs'}",
    )
    recipe, scored = write_job(tmp_path), tmp_path / "routed.jsonl"
    train(recipe, *options, "train_iters=2")
    loaded = load_recipe(recipe, options)
    run_score(loaded, ScoreConfig(output=str(scored), record_routes=True))
    layers = loaded.model.num_layers
    assert {one.signals.routes.ids.shape[1] for one in read_samples(scored) if one.signals.routes is not None} == {
        layers
    }
    train(recipe, *options, f"data.path={scored}", f"checkpoint.save={tmp_path / 'again'}", *VERIFY)


def test_only_a_policy_with_experts_records_routes(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    train(recipe, "train_iters=2", f"checkpoint.save={tmp_path / 'runs'}")
    loaded = load_recipe(recipe, [f"checkpoint.save={tmp_path / 'runs'}"])
    with pytest.raises(RecipeError, match=r"score\.record_routes=true requires a model with experts"):
        run_score(loaded, ScoreConfig(output=str(tmp_path / "routed.jsonl"), record_routes=True))
    with pytest.raises(RecipeError, match=r"score\.record_routes records the experts of a policy, but .* gives values"):
        run_score(
            load_recipe(recipe, ["objective.name=critic"]),
            ScoreConfig(output=str(tmp_path / "routed.jsonl"), record_routes=True),
        )


def test_steps_report_the_cost_of_routes(job: Path, tmp_path: Path) -> None:
    (step, *_) = train(job, *EXPERTS).reports
    assert step.metrics["fold_ratio_without_routes"] > step.fold_ratio
    (tmp_path / "plain").mkdir()
    (plain, *_) = train(write_job(tmp_path / "plain"), *EXPERTS).reports
    assert step.metrics["fold_ratio_without_routes"] == plain.fold_ratio
    assert "fold_ratio_without_routes" not in plain.metrics


def test_inspect_reports_the_cost_of_routes(job: Path) -> None:
    data = job.parent / "data.jsonl"
    report = json.loads(run_command("inspect", data, "--json").stdout)
    assert report["fold_ratio_without_routes"] > report["fold_ratio"]
    assert "without routes" in run_command("inspect", data).stdout
