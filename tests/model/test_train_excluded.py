"""Excluded members, subagents, and files without a scored token, through the commands that take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command, write_rows
from harness.train_jobs import FLOAT64, rows, train, write_job

from mcore_prefix_tree import SampleError

BY_GROUP = ("batch.global_batch_size=null", "batch.groups_per_step=2", "train_iters=2", "optimizer.lr_warmup_steps=0")
BASELINES = ["grpo", "rloo", "dr_grpo", "dapo"]
UNSCORED = [{"tokens": [1, 2, 3], "loss_mask": [1, 0, 0]}, {"tokens": [4]}]
WAY_OUT = "give samples with an assistant turn, or with a 'loss_mask' that is above 0 behind the first token"


def agents(bad: float = 0.5) -> list[dict[str, Any]]:
    """Three groups of rollouts of one to three samples, the later ones of subagents, line by line in turn."""
    of_rollouts = []
    for group in range(3):
        for rollout in range(4):
            reward = bad if rollout == 2 else float(rollout == group)
            lines = [
                {
                    "tokens": [*([10 + group, 11] if turn == 0 else [30 + turn + group]), 40 + rollout, 50 + turn],
                    "group": group,
                    "rollout": rollout,
                    "turn": turn,
                    "reward": reward,
                }
                for turn in range(1 + (group + rollout) % 3)
            ]
            for one in lines:
                prompt = len(one["tokens"]) - 2
                one |= {"loss_mask": [0] * prompt + [1, 1], "old_logprobs": [None] * prompt + [-4.0, -4.5]}
            of_rollouts.append(lines)
    made = []
    while any(of_rollouts):
        made += [lines.pop(0) for lines in of_rollouts if lines]
    return made


def by_group(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with those of a group next to each other, as streaming wants them."""
    return sorted(content, key=lambda row: row["group"])


def job_of(folder: Path, name: str, content: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    job = write_job(folder, content)
    job.write_text(f"{job.read_text()}objective: {{name: {name}}}\n")
    return job


@pytest.mark.parametrize("name", BASELINES)
def test_step_is_that_of_the_batch_without_the_excluded(tmp_path: Path, name: str) -> None:
    """In memory and streamed, in every loss and gradient, with a reward that would move every baseline."""
    marked = [row | ({"exclude": True} if row["rollout"] == 2 else {}) for row in by_group(agents(bad=1e3))]
    without = job_of(tmp_path / "without", name, [row for row in by_group(agents()) if row["rollout"] != 2])
    expected = train(without, *FLOAT64, *BY_GROUP)
    for streaming in ("false", "true"):
        job = job_of(tmp_path / streaming, name, marked)
        notes = train(job, *FLOAT64, *BY_GROUP, f"data.streaming={streaming}")
        number = sum("exclude" in row for row in marked)
        assert notes.told[0] == f"excluded {number} by the field 'exclude'"
        assert f"not trained on: {notes.told[0]}" in notes.told
        assert notes.losses == pytest.approx(expected.losses, rel=1e-12)
        for mine, other in zip(notes.reports, expected.reports, strict=True):
            assert (mine.samples, mine.logical_tokens) == (other.samples, other.logical_tokens)
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
            assert mine.metrics == pytest.approx(other.metrics, rel=1e-12)


def test_interleaved_subagents_train_as_sorted_ones(tmp_path: Path) -> None:
    content = agents()
    runs = [
        train(job_of(tmp_path / name, "grpo", lines), *FLOAT64, *BY_GROUP, "data.order=file")
        for name, lines in (("apart", content), ("sorted", by_group(content)))
    ]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-12)
    assert runs[0].reports[1].samples == runs[1].reports[1].samples


def test_error_of_a_single_rollout_counts_excluded_records(tmp_path: Path) -> None:
    content = [row | {"exclude": row["rollout"] != 1} for row in by_group(agents())]
    says = r"has only this rollout in the step, .* \(excluded \d+ by the field 'exclude'\)$"
    for streaming in ("false", "true"):
        job = job_of(tmp_path / streaming, "grpo", content)
        with pytest.raises(SampleError, match=says):
            train(job, *BY_GROUP, f"data.streaming={streaming}")
    assert len(train(job, *BY_GROUP, 'objective.options={"alone": "zero"}').losses) == 2


@pytest.mark.parametrize("name", ["scored.jsonl", "scored.parquet"])
def test_score_keeps_the_excluded_in_its_place(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path / "job", "grpo", [row | {"exclude": int(row["rollout"] == 2)} for row in agents()])
    save = f"checkpoint.save={tmp_path / 'runs'}"
    train(job, *BY_GROUP, save)
    scored = tmp_path / name
    run_command("score", job, save, *BY_GROUP[:2], "--output", scored, code=0)
    if name.endswith("jsonl"):
        written = [json.loads(line) for line in scored.read_text().splitlines()]
    else:
        written = pytest.importorskip("pyarrow.parquet").read_table(scored).to_pylist()
    given = by_group(agents())
    assert [list(row["tokens"]) for row in written] == [row["tokens"] for row in given]
    assert [bool(row.get("exclude")) for row in written] == [row["rollout"] == 2 for row in given]
    notes = train(job, *BY_GROUP, f"data.path={scored}")
    assert notes.told[0] == f"excluded {sum(row['rollout'] == 2 for row in given)} by the field 'exclude'"


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_files_without_a_scored_token(tmp_path: Path, streaming: str) -> None:
    """For training, validation, scores, verification and measurement; one scored token is enough."""
    job = write_job(tmp_path)
    save = f"checkpoint.save={tmp_path / 'runs'}"
    train(job, save, "train_iters=1", "optimizer.lr_warmup_steps=0")
    bad = write_rows(tmp_path / "bad.jsonl", UNSCORED)
    of_data = f"{bad}: no token is scored, so data.path has no loss; {WAY_OUT}"
    of_validation = f"{bad}: no token is scored, so validation.path has no loss; {WAY_OUT}"
    more, output = (f"data.path={bad}", f"data.streaming={streaming}"), str(tmp_path / "scored.jsonl")
    for arguments, says in (
        (("train", job, *more), of_data),
        (("train", job, f"validation.path={bad}"), of_validation),
        (("verify", job, *more), of_data),
        (("score", job, save, *more, "--output", output), of_data),
        (("bench", Path("step"), str(job), *more), of_data),
    ):
        result = run_command(*arguments)  # type: ignore[arg-type]
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"error: {says}")
    result = run_command("score", job, save, *more, "--output", output, "--all-tokens", code=0)
    write_rows(bad, [*UNSCORED, {"tokens": [1, 2, 3], "loss_mask": [0, 0, 0.5]}])
    notes = train(job, f"validation.path={bad}", "train_iters=1", "optimizer.lr_warmup_steps=0")
    assert all(one.loss > 0 for one in notes.evaluations)


def test_reward_model_scores_samples_without_a_scored_token(tmp_path: Path) -> None:
    """It scores the position after the last token, and reads no mask."""
    pairs = [row | {"pair": at // 2, "chosen": at % 2 == 0, "loss_mask": None} for at, row in enumerate(rows()[:12])]
    job = write_job(tmp_path, [{k: v for k, v in row.items() if v is not None} for row in pairs])
    more = ("objective.name=reward_model", f"checkpoint.save={tmp_path / 'runs'}")
    train(job, *more, "train_iters=1", "optimizer.lr_warmup_steps=0")
    bad = write_rows(tmp_path / "bad.jsonl", UNSCORED)
    run_command("score", job, *more, f"data.path={bad}", "--output", tmp_path / "scored.jsonl", code=0)
    assert all("reward" in json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines())
