"""Output of ``score`` serves the next commands: turns fold as before, and no input file is replaced."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.commands import run_command, write_rows

from mcore_prefix_tree.data import read_samples

pytest.importorskip("mistral_common")
ROLLOUTS = Path(__file__).parents[2] / "recipes" / "data" / "quickstart_rollouts.jsonl"
RECIPE = """
data: {{path: {data}, tokenizer: mistral-v7, expand_turns: true}}
model: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 32768, dtype: float64}}
batch: {{global_batch_size: 12, max_tokens: 8192}}
optimizer: {{lr: 1.0e-2, clip_grad: 0}}
train_iters: 2
attention_backend: path
verify: {{enabled: false}}
checkpoint: {{save: {folder}/run}}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that makes a sample of each turn, and has been trained."""
    folder = tmp_path_factory.mktemp("serves")
    with ROLLOUTS.open() as lines:
        (folder / "rollouts.jsonl").write_text("".join(islice(lines, 5)))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(data=folder / "rollouts.jsonl", folder=folder))
    steps(recipe)
    return recipe


def steps(recipe: Path, *overrides: str) -> list[tuple[float, float]]:
    """Return the loss and the fold ratio of each step of a training run."""
    log = recipe.parent / "metrics.jsonl"
    run_command("train", recipe, *overrides, f"log.metrics={log}", code=0)
    rows: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["loss"], row["fold_ratio"]) for row in rows]


@pytest.fixture(scope="module")
def expected(job: Path) -> dict[str, list[tuple[float, float]]]:
    """The steps on the conversations, by the order of samples."""
    return {order: steps(job, "checkpoint.save=null", f"data.order={order}") for order in ("shuffled", "folded")}


def score(recipe: Path, output: Path, *arguments: str) -> str:
    done = run_command("score", recipe, *arguments, "--output", output, code=0)
    return str(done.stdout)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("scored.jsonl", "shuffled"),
        ("scored.parquet", "folded"),
        pytest.param("scored.jsonl", "folded", marks=pytest.mark.ci),
        pytest.param("scored.parquet", "shuffled", marks=pytest.mark.ci),
    ],
)
def test_scored_turns_train_as_the_conversations(
    job: Path, expected: dict[str, Any], tmp_path: Path, name: str, order: str
) -> None:
    score(job, tmp_path / name)
    unsaved = ("checkpoint.save=null", f"data.order={order}")
    scored = steps(job, *unsaved, f"data.path={tmp_path / name}", "data.expand_turns=false")
    assert [fold for _, fold in scored] == [fold for _, fold in expected[order]]
    np.testing.assert_allclose([loss for loss, _ in scored], [loss for loss, _ in expected[order]], rtol=1e-12)
    assert min(fold for _, fold in scored) > 2
    if order == "shuffled":
        assert steps(job, *unsaved, f"data.path={tmp_path / name}", "data.streaming=true") == scored


def test_the_documented_distillation_folds_as_the_rollouts(job: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    taught = tmp_path / "taught.jsonl"
    score(job, taught, "--teacher-top-k", "32")
    unsaved = ("checkpoint.save=null",)
    learnt = steps(job, *unsaved, f"data.path={taught}", "objective.name=distill")
    assert [fold for _, fold in learnt] == [fold for _, fold in expected["shuffled"]]
    rows = [json.loads(line) for line in taught.read_text().splitlines()]
    for row in rows:
        scored = [bool(t and weight) for t, weight in enumerate(row["loss_mask"])]
        for part in ("token_ids", "logprobs"):
            assert [one is not None for one in row["teacher"][part]] == scored
    # Rows for every token, as files had them: the same training, to the last bit.
    for row in rows:
        teacher = row["teacher"]
        teacher["token_ids"] = [[*range(32)] if one is None else one for one in teacher["token_ids"]]
        teacher["logprobs"] = [[None] * 32 if one is None else one for one in teacher["logprobs"]]
    full = write_rows(tmp_path / "full.jsonl", rows)
    assert steps(job, *unsaved, f"data.path={full}", "objective.name=distill") == learnt
    assert full.stat().st_size > 3 * taught.stat().st_size
    # Written again, into a table, and read from there.
    score(job, tmp_path / "again.parquet", f"data.path={taught}")
    for one, other in zip(read_samples(taught), read_samples(tmp_path / "again.parquet"), strict=True):
        assert one.signals.teacher is not None
        assert other.signals.teacher is not None
        np.testing.assert_array_equal(one.signals.teacher.logprobs, other.signals.teacher.logprobs)
    assert steps(job, *unsaved, f"data.path={tmp_path / 'again.parquet'}", "objective.name=distill") == learnt


def test_no_file_that_is_read_is_replaced(job: Path, tmp_path: Path) -> None:
    metadata = job.parent / "run" / "iter_0000002" / "metadata.json"
    before = metadata.read_bytes()
    (tmp_path / "link.json").symlink_to(metadata)
    (tmp_path / "folder").symlink_to(metadata.parent)
    os.link(metadata, tmp_path / "hard.json")
    around = metadata.parent / ".." / "iter_0000002" / "metadata.json"
    linked = [tmp_path / name for name in ("link.json", "folder/metadata.json", "hard.json")]
    for path in (metadata, around, *linked):
        done = run_command("score", job, "--output", path, code=2)
        assert f"--output {path}: is read by this command, which would replace it" in done.stderr
    options = ("--reference", str(job.parent / "run"), "--output", str(metadata))
    done = run_command("score", job, f"checkpoint.save={tmp_path / 'other'}", *options, code=2)
    assert "is read by this command" in done.stderr
    assert metadata.read_bytes() == before
    # Another file in the run's folder is no input, also the second time.
    for _ in range(2):
        score(job, job.parent / "run" / "scored.jsonl")


def test_home_folder_in_paths_is_expanded(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    done = run_command("train", job, "checkpoint.save=~/run", "log.metrics=~/metrics.jsonl", "train_iters=1", code=0)
    done = run_command("score", job, "checkpoint.save=~/run", "--output=~/scored.jsonl", code=0)
    assert sorted(os.listdir(tmp_path / "home")) == ["metrics.jsonl", "run", "scored.jsonl"]
    settings = (
        *("checkpoint.save", "checkpoint.pretrained_checkpoint", "data.path", "validation.path", "data.tokenizer"),
        *("log.tensorboard", "objective.teacher_recipe", "model.hf", "checkpoint.export_hf"),
    )
    for setting in settings:
        done = run_command("train", job, f"{setting}=s3://bucket/one", code=2)
        assert setting in done.stderr
        assert "s3://bucket/one is a URL" in done.stderr
    done = run_command("train", job, "log.metrics=https://host/one.jsonl")
    assert "log.metrics: https://host/one.jsonl is a URL" in done.stderr
    done = run_command("train", job, "checkpoint.save=~nobody-of-this-name/run")
    assert "~nobody-of-this-name is no user's home" in done.stderr
    options = (
        ("score", job, "--output", "s3://bucket/one.jsonl"),
        ("train", job, "--plot", "s3://bucket/one.png"),
        ("export", job, "s3://bucket/one"),
        ("bench", "step", str(job), "--output", "s3://bucket/one.json"),
        ("xtoken", "build-projection", "--student", "mistral-v7", "--teacher", "mistral-v3", "s3://bucket/one.pt"),
        ("xtoken", "export-teacher", str(job), "--output", "s3://bucket/one.jsonl"),
        ("recipes", "s3://bucket/one"),
        ("inspect", "s3://bucket/one.jsonl"),
    )
    for name, first, *others in options:
        done = run_command(name, first, *others, code=2)  # type: ignore[arg-type]  # a recipe, or another command's first argument
        assert "is a URL" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["home"]
