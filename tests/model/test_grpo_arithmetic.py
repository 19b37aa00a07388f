"""The GRPO example: its rewards, and equal samples and training with and without folding."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.train_jobs import train

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.settings import load_recipe

ROOT = Path(__file__).parents[2]
SMALL = [f"data.path={ROOT / 'recipes/data/arithmetic_prompts.jsonl'}", "batch.global_batch_size=32", "train_iters=8"]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/grpo_arithmetic.py"))


def test_prompts_match_the_recipe(script: dict[str, Any], tmp_path: Path) -> None:
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


def test_curve_file_records_its_settings(script: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "curve.png"], "--plot needs matplotlib; install it with: pip install matplotlib"),
        (["--plot", "nowhere/curve.png"], "nowhere/curve.png: its folder does not exist; create it"),
        (["--output", "nowhere/curves.json"], "nowhere/curves.json: its folder does not exist; create it"),
    ],
)
def test_missing_requirements_are_reported_before_the_run(
    script: dict[str, Any],
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(script["main"].__globals__, "run", lambda *_, **__: pytest.fail("it trained"))
    monkeypatch.setattr(sys, "argv", ["grpo_arithmetic.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        script["main"]()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {says}\n")


def test_recipe_says_it_is_not_for_train() -> None:
    """``train`` would end with a missing group: the prompts are no rollouts."""
    recipe = ROOT / "recipes/grpo_arithmetic.yaml"
    top = recipe.read_text().partition("\ndata:")[0]
    assert "not for `mcore-prefix-tree train`" in top
    (row,) = [
        line for line in (ROOT / "recipes/README.md").read_text().splitlines() if "(grpo_arithmetic.yaml)" in line
    ]
    assert "not for `mcore-prefix-tree train`" in row
    with pytest.raises(SampleError, match="field 'group' is missing"):
        train(load_recipe(recipe, [SMALL[0], "checkpoint.save=null"]))


@pytest.mark.slow
def test_folded_and_unfolded_runs_are_one_curve(script: dict[str, Any]) -> None:
    recipe = str(ROOT / "recipes/grpo_arithmetic.yaml")
    folded, unfolded = (script["run"](recipe, SMALL, unfolded=unfolded) for unfolded in (False, True))
    assert len(folded) == 4
    for one, other in zip(folded, unfolded, strict=True):
        assert one["first_ratio"] == other["first_ratio"] == 1.0
        assert other["physical_tokens"] == other["logical_tokens"] > 2 * one["physical_tokens"]
        for name in ("reward", "right", "entropy", "clip_fraction", "logical_tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-9)
