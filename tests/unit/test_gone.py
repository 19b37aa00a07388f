"""What a user could have set in an earlier version gets one sentence with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.commands import run_command

from mcore_prefix_tree.utils.gone import GONE, explain_gone

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
XTOKEN = ("verify", RECIPE, "objective.name=xtoken", "objective.teacher_recipe=teacher.yaml")
BUILD = ("xtoken", "build-projection", "w.pt", "--student", "mistral-v7", "--teacher", "mistral-v3")
LINES = {
    "batch.calibration": ("verify", RECIPE, "batch.calibration=costs.json"),
    "calibrate": ("calibrate", RECIPE),
    "--calibration": ("plan", "data.jsonl", "--max-tokens", "64", "--calibration", "costs.json"),
    "verify --megatron-lm-path": ("verify", RECIPE, "--megatron-lm-path", "../Megatron-LM"),
    "partition_kl": (*XTOKEN, "objective.options.mode=partition_kl"),
    "objective.options.scaling": (*XTOKEN, "objective.options.scaling=dynamic"),
    "objective.options.teachers": (*XTOKEN, "objective.options.teachers=scores"),
    "objective.options.score_sharpness": (*XTOKEN, "objective.options.score_sharpness=2.0"),
    "--sparse": (*BUILD, "--sparse"),
    "bench attention": ("bench", "attention", "data.jsonl", "--predict", "h100"),
}


@pytest.mark.parametrize("name", GONE)
def test_the_way_out_is_told(name: str) -> None:
    done = run_command(*LINES[name], code=2)
    assert f"{name} is gone: {GONE[name]}" in " ".join(done.stderr.split())
    assert done.stderr.count("\n") == 1


def test_names_that_only_contain_a_gone_one_are_not_gone() -> None:
    assert (
        explain_gone("batch.calibration2") is explain_gone("plan --calibrations") is explain_gone("recalibrate") is None
    )
