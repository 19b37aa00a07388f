"""Pictures of inspect, train and bench: their data, and that a file is written."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from harness.commands import run_command, write_rows

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.layout.forest import tokens_by_depth
from mcore_prefix_tree.sample import Sample

PNG, SVG = b"\x89PNG", b"<?xml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    data = write_rows(tmp_path / "data.jsonl", ({"tokens": [1, 2, token]} for token in range(4, 10)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{path: {data}}}\n"
        "model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 16}\n"
        "batch: {global_batch_size: 2, max_tokens: 64}\n"
        "train_iters: 3\nattention_backend: path\nverify: {enabled: false}\n"
        f"validation: {{path: {data}, eval_interval: 2}}\n"
    )
    return path


def test_tokens_by_depth_count_each_sample_by_hand() -> None:
    texts = [[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4], [7]]
    logical, physical = tokens_by_depth(fold([Sample(tokens=np.array(text)) for text in texts]))
    longest = max(map(len, texts))
    assert logical.tolist() == [sum(len(text) > depth for text in texts) for depth in range(longest)]
    prefixes = [{tuple(text[: depth + 1]) for text in texts if len(text) > depth} for depth in range(longest)]
    assert physical.tolist() == [len(unique) for unique in prefixes]


@pytest.mark.parametrize("command", ["inspect", "plan --max-tokens 14 --dp 3"])
@pytest.mark.parametrize(("name", "kind"), [("forest.png", PNG), ("forest.SVG", SVG)])
def test_samples_are_drawn(recipe: Path, tmp_path: Path, command: str, name: str, kind: bytes) -> None:
    pytest.importorskip("matplotlib")
    for _ in range(2):  # the second replaces it
        done = run_command(*command.split(), tmp_path / "data.jsonl", "--plot", tmp_path / name)
        assert (done.exit_code, done.stderr) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(kind)


def test_train_draws_its_steps(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_command("train", recipe, "--plot", tmp_path / "steps.svg")
    assert (done.exit_code, done.stderr) == (0, "")
    drawn = (tmp_path / "steps.svg").read_bytes()
    assert drawn.startswith(SVG)
    assert done.stdout.splitlines()[-1] == "nothing is saved: checkpoint.save is not set"


def test_bench_draws_times_and_memory(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    done = run_command("bench", "step", recipe, "--repeats", "1", "--plot", picture)
    assert (done.exit_code, done.stderr) == (0, "")
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("command", ["inspect", "train", "bench step", "plan --max-tokens 9"])
def test_pictures_are_checked_before_the_work(
    recipe: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "data.jsonl" if command.startswith(("inspect", "plan")) else recipe
    words = [*command.split(), str(given), "--plot"]
    wrong_end = "give a file name that ends with .png or .svg"
    absent = "its folder does not exist or cannot be written to; create it, or name another"
    for name, says in (("picture.gif", wrong_end), ("picture", wrong_end), ("missing/picture.png", absent)):
        done = run_command(*words, name)
        assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: --plot {name}: {says}\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run_command(*words, tmp_path / "picture.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == ("error: --plot needs matplotlib; install it with: pip install 'matplotlib>=3.8'\n")


def test_train_draws_reported_rewards(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"group": "a", "old_logprobs": [None, None, -2.0], "ref_logprobs": [None, None, -2.5]}
    rows = [{"tokens": [1, 2, 4 + at], "loss_mask": [0, 0, 1], "reward": at, **row} for at in range(2)]
    write_rows(tmp_path / "data.jsonl", rows)
    grpo = ["objective.name=grpo", "objective.options={kl_coef: 0.1}", "validation.path=null"]
    texts = []
    for overrides in (["validation.path=null"], grpo):
        arguments = [*overrides, "--plot", str(tmp_path / "steps.svg")]
        run_command("train", recipe, *arguments, code=0)
        texts.append((tmp_path / "steps.svg").read_text())
    for panel in ("reward", "KL divergence", "clip fraction"):
        assert [f"<!-- {panel} -->" in text for text in texts] == [False, True]
