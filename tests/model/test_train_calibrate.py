"""Timing micro-batches, and plans from these times."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command
from harness.train_jobs import batch_of, resolved, train, world_of_one

from mcore_prefix_tree.layout.stats import forest_counts
from mcore_prefix_tree.mcore.engine import calibration as module
from mcore_prefix_tree.mcore.loop.jobs import measure_costs, run_once
from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_HYBRID_MODEL
from mcore_prefix_tree.plan import CostModel, ModelWork, read_measured
from mcore_prefix_tree.settings import load_recipe

KNOWN = CostModel(token=3e-4, pair=5e-6, scored=4e-4, micro_batch=2e-3)


def test_known_costs_are_found(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose times follow a cost model exactly, in the best of rounds that noise slows."""
    noise = random.Random(0)

    def seconds(chunks: object, batch: Any, job: object) -> float:
        return noise.choice([1.0, 1.3, 1.7]) * KNOWN.of_micro_batch(
            batch.layout.padded_size, batch.layout.visible_pairs, int((batch.layout.loss_weight != 0).sum())
        )

    monkeypatch.setattr(module, "_seconds", seconds)
    found, is_main = run_once(load_recipe(job), partial(measure_costs, repeats=40), is_trained=True)
    assert is_main
    assert vars(found.cost) == pytest.approx(vars(KNOWN))
    assert found.worst < 1e-9
    shapes = {(one.tokens, one.pairs, one.scored) for one in found.measured}
    assert len(shapes) == len(found.measured) >= 8
    assert max(one.tokens for one in found.measured) <= 40
    depths = sorted(one.pairs / one.tokens for one in found.measured)
    assert depths[-1] > 1.5 * depths[0], "or the two costs cannot be told apart"


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="HybridModel came with megatron-core 0.18")
def test_costs_of_segments_and_levels_are_found(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(KNOWN, segment=7e-3, level=9e-3)

    def seconds(chunks: object, batch: Any, job: object) -> float:
        layout = batch.layout
        scored, counts = int((layout.loss_weight != 0).sum()), forest_counts(layout)
        return known.of_micro_batch(
            layout.padded_size, layout.visible_pairs, scored, counts["segments"], counts["segment_levels"]
        )

    monkeypatch.setattr(module, "_seconds", seconds)
    options = ["model.hybrid_layer_pattern=M*", "batch.max_tokens=100"]
    options.append("model.transformer={mamba_state_dim: 8, mamba_head_dim: 8, mamba_num_groups: 2}")
    found, _ = run_once(load_recipe(job, options), partial(measure_costs, repeats=1), is_trained=True)
    assert found.cost.state_tokens == ModelWork.from_model(load_recipe(job, options).model).state_tokens > 0
    assert vars(replace(found.cost, state_tokens=0)) == pytest.approx(vars(known))
    assert max(one.tokens for one in found.measured) <= 100
    assert max(one.levels for one in found.measured) >= 8


def test_head_on_all_tokens_has_no_separate_cost(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = CostModel(token=3e-4, pair=5e-6, micro_batch=2e-3)

    def seconds(chunks: object, batch: Any, job: object) -> float:
        return known.of_micro_batch(batch.layout.padded_size, batch.layout.visible_pairs)

    monkeypatch.setattr(module, "_seconds", seconds)
    found, _ = run_once(load_recipe(job, ["fused_head=false"]), partial(measure_costs, repeats=1), is_trained=True)
    assert vars(found.cost) == pytest.approx(vars(known))
    assert {one.scored for one in found.measured} == {0}


def test_a_policy_is_timed_by_the_supervised_loss(job: Path) -> None:
    found, _ = run_once(
        load_recipe(job, ["objective.name=reinforce"]), partial(measure_costs, repeats=1), is_trained=True
    )
    assert all(one.seconds > 0 for one in found.measured)


def test_command_writes_a_file_that_plans_read(job: Path, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    result = run_command("calibrate", job, "--output", path, "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert "a token costs" in result.stdout
    measured = read_measured(str(path))
    assert all(one.seconds > 0 for one in measured)
    content = json.loads(path.read_text())
    assert content["machine"]["torch"]
    assert vars(CostModel().calibrated(measured)) == pytest.approx(content["cost"])

    recipe = load_recipe(job, [f"batch.calibration={path}"])
    with world_of_one(recipe) as place:
        path.rename(tmp_path / "elsewhere")  # which a running job takes no notice of
        assert vars(resolved(recipe, place).job.folding.cost_model) == content["cost"]
        (tmp_path / "elsewhere").rename(path)
    # Balance only changes which rank computes a sample.
    assert train(recipe).losses == pytest.approx(train(job).losses, rel=1e-4)

    data = str(job.parent / "data.jsonl")
    planned = run_command("plan", Path(data), "--max-tokens", "40", "--calibration", path, "--json")
    report = json.loads(planned.stdout)
    assert report["cost_unit"] == "seconds"
    (rank,) = report["ranks"]
    cost = CostModel(**content["cost"])
    assert [one["cost"] for one in rank] == pytest.approx(
        [cost.of_micro_batch(one["tokens"], one["pairs"], one["scored"]) for one in rank]
    )


def test_unwritable_output_is_rejected_before_measuring(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "calibrate", None)
    result = run_command("calibrate", job, "--output", tmp_path / "nowhere" / "measured.json")
    assert result.exit_code == 2
    assert result.stderr.endswith("nowhere/measured.json: its folder does not exist; create it\n")


def test_calibration_trains_nothing_and_restores_the_schedule(job: Path) -> None:
    recipe = load_recipe(job)
    assert len(batch_of(recipe, 1)) == 6
    found, _ = run_once(recipe, partial(measure_costs, repeats=1), is_trained=True)
    assert found.cost.token > 0
    assert train(job).losses == train(job).losses


NONE = "holds no measurements; make it with mcore-prefix-tree calibrate RECIPE --output FILE"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", NONE),
        ("{}", NONE),
        ('{"measured": 3}', NONE),
        ("[]", NONE),
        ('{"measured": [{"tokens": 1}]}', "measured[0].pairs is None; it must be a number above 0"),
    ],
)
def test_a_file_of_something_else_is_named(job: Path, tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    result = run_command("train", job, f"batch.calibration={path}")
    assert (result.exit_code, result.stderr) == (2, f"error: {path}: {says}\n")
