"""The GRPO example: what it rewards, and that folding changes nothing of what it samples and learns."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [f"data.path={ROOT / 'recipes/data/arithmetic_prompts.jsonl'}", "batch.global_batch_size=32", "train_iters=8"]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/grpo_arithmetic.py"))


def test_the_prompts_are_the_recipe_s(script: dict[str, Any], tmp_path: Path) -> None:
    script["write_prompts"](str(tmp_path / "prompts.jsonl"))
    written = (tmp_path / "prompts.jsonl").read_text()
    assert written == (ROOT / "recipes/data/arithmetic_prompts.jsonl").read_text()
    assert len(written.splitlines()) == 55


@pytest.mark.parametrize(
    ("given", "right", "worth"),
    [("8.", "8.", 1.0), ("9.", "8.", 0.5), ("12.", "12.", 1.0), ("8.", "18.", 0.0), ("111", "11.", 2 / 3)],
)
def test_the_reward(script: dict[str, Any], given: str, right: str, worth: float) -> None:
    assert script["reward"](script["encode"](given), script["encode"](right)) == worth
    assert script["answer"](script["encode"]("the sum of 3+5=")) == script["encode"]("8.")


def test_a_curve_says_what_made_it(script: dict[str, Any]) -> None:
    recipe = str(ROOT / "recipes/grpo_arithmetic.yaml")
    folded, unfolded = (
        script["settings_of"](recipe, [*SMALL, "seed=7"], unfolded=unfolded, warm_up_steps=3)
        for unfolded in (False, True)
    )
    assert json.loads(json.dumps(folded)) == folded
    assert (folded["seed"], folded["warm_up_steps"], folded["recipe"]["seed"]) == (7, 3, 7)
    assert folded["recipe"]["objective"]["name"] == "grpo"
    assert folded["recipe"]["batch"]["global_batch_size"] == 32
    different = {name for name in folded if folded[name] != unfolded[name]}
    assert different == {"recipe"}
    assert unfolded["recipe"]["batch"] == folded["recipe"]["batch"] | {"min_shared_tokens": 1_000_000}


def test_folded_and_unfolded_runs_are_one_curve(script: dict[str, Any]) -> None:
    recipe = str(ROOT / "recipes/grpo_arithmetic.yaml")
    folded, unfolded = (script["run"](recipe, SMALL, unfolded=unfolded) for unfolded in (False, True))
    assert len(folded) == 4
    for one, other in zip(folded, unfolded, strict=True):
        assert one["first_ratio"] == other["first_ratio"] == 1.0
        assert other["physical_tokens"] == other["logical_tokens"] > 2 * one["physical_tokens"]
        for name in ("reward", "right", "entropy", "clip_fraction", "logical_tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-9)
