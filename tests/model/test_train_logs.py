"""Records of a run's steps, the part that a resumed run keeps, and errors before the first step."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command
from harness.train_jobs import Notes, objective_job, train

from mcore_prefix_tree.mcore.loop import logs
from mcore_prefix_tree.mcore.loop.logs import LogError
from mcore_prefix_tree.mcore.loop.trainer import StepReport

STEP = StepReport(
    iteration=1,
    loss=2.0,
    grad_norm=None,
    lr=0.1,
    samples=3,
    logical_tokens=8,
    physical_tokens=4,
    plan_seconds=0.5,
    seconds=2.0,
    metrics={"kl": 0.25, "unknown": float("nan")},
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line_of(report: StepReport) -> dict[str, Any]:
    """The line that the file has for a report."""
    return asdict(report) | {
        "fold_ratio": report.logical_tokens / report.physical_tokens,
        "logical_tokens_per_second": report.logical_tokens / report.seconds,
        "physical_tokens_per_second": report.physical_tokens / report.seconds,
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's scalars, by name: steps and values."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(folder))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def curve(notes: Notes, name: str) -> list[tuple[int, Any]]:
    return [(report.iteration, pytest.approx(getattr(report, name), rel=1e-6)) for report in notes.reports]


def test_the_file_has_all_that_was_reported(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "metrics.jsonl"
    notes = train(job, f"log.metrics={file}")
    assert lines(file) == [line_of(report) for report in notes.reports]
    assert [line["iteration"] for line in lines(file)] == [1, 2, 3, 4, 5, 6]
    assert notes.told == []


def test_metrics_file_has_the_objectives_metrics(tmp_path: Path) -> None:
    job, overrides = objective_job(tmp_path, "grpo", {"kl_coef": 0.05})
    notes = train(job, *overrides, f"log.metrics={tmp_path / 'metrics.jsonl'}", "train_iters=2")
    written = lines(tmp_path / "metrics.jsonl")
    assert written == [line_of(report) for report in notes.reports]
    assert {"reward", "kl", "clip_fraction", "entropy"} <= written[0]["metrics"].keys()


def test_every_line_is_there_when_its_step_is_done(job: Path, tmp_path: Path) -> None:
    """Also if the run is killed: nothing waits for the end."""
    file = tmp_path / "metrics.jsonl"
    found = []

    class Looking(Notes):
        def step(self, report: Any) -> None:
            found.append(len(lines(file)))

    from mcore_prefix_tree.mcore.loop.jobs import run_train
    from mcore_prefix_tree.settings import load_recipe

    run_train(load_recipe(job, [f"log.metrics={file}", "train_iters=3"]), Looking())
    assert found == [1, 2, 3]


def test_resumed_run_continues_the_metrics_file_at_its_checkpoint(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    options = (f"log.metrics={file}", f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=2")
    first = train(job, *options, stop_after=5)
    with file.open("a") as stream:
        stream.write('{"iteration": 6, "lo')  # killed while it wrote
    second = train(job, *options, resume=True)
    assert f"log.metrics={file}: dropped 2 lines of steps after step 4" in second.told
    assert lines(file) == [line_of(report) for report in (*first.reports[:4], *second.reports)]
    before = file.stat().st_ino
    assert train(job, *options, resume=True).reports == []
    assert [line["iteration"] for line in lines(file)] == [1, 2, 3, 4, 5, 6]
    assert file.stat().st_ino == before, "nothing was dropped, so nothing is written anew"


def test_a_run_that_starts_again_starts_its_file_again(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    train(job, f"log.metrics={file}", "train_iters=3")
    again = train(job, f"log.metrics={file}", "train_iters=2")
    assert again.told == [f"log.metrics={file}: dropped 3 lines of another run"]
    assert lines(file) == [line_of(report) for report in again.reports]


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ('{"tokens": [1]}\n', 1),
        ('{"iteration": 1}\nmy notes\n', 2),
        ("my notes", 1),
        ('{"iteration": "one"}\n', 1),
        ("[1]\n", 1),
    ],
)
def test_file_with_other_content_is_not_changed(job: Path, tmp_path: Path, content: str, number: int) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text(content)
    result = run_command("train", job, f"log.metrics={file}", "train_iters=2", code=2)
    assert result.stderr == (
        f"error: log.metrics={file}: line {number} is not a step of a run, and the run would append to the file; name "
        "another\n"
    )
    assert file.read_text() == content
    assert "step 1" not in result.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("metrics.csv", "log.metrics: give a name that ends in .jsonl, the format of the file (given "),
        ("in_the_way/metrics.jsonl", "in_the_way/metrics.jsonl: File exists; name a file that can be written to"),
        ("in_the_way/below/metrics.jsonl", "metrics.jsonl: Not a directory; name a file that can be written to"),
        ("folder.jsonl", "folder.jsonl: exists and is not a regular file; name another"),
    ],
)
def test_unwritable_metrics_file_is_rejected_before_the_first_step(
    job: Path, tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "in_the_way").touch()
    (tmp_path / "folder.jsonl").mkdir()
    result = run_command("train", job, f"log.metrics={tmp_path / name}", "train_iters=2", code=2)
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "step 1" not in result.stdout


def test_full_disk_error_names_the_setting(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        close = flush = lambda self: self.write("")

    file = tmp_path / "metrics.jsonl"
    log = logs._MetricsFile(str(file), 0, print)
    monkeypatch.setattr(log, "_stream", Full())
    with pytest.raises(LogError) as error:
        log.step(STEP)
    assert str(error.value) == f"log.metrics={file}: No space left on device; name a file that can be written to"
    log.close()


def test_full_disk_of_a_log_ends_no_run(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    written = logs._MetricsFile._write

    def until_full(self: Any, line: dict[str, Any]) -> None:
        if line["iteration"] > 2:
            raise LogError(f"log.metrics={file}: No space left on device")
        written(self, line)

    monkeypatch.setattr(logs._MetricsFile, "_write", until_full)
    notes = train(job, f"log.metrics={file}")
    assert notes.told == [f"log.metrics={file}: No space left on device; the run continues without it"]
    assert (len(notes.reports), len(lines(file))) == (6, 2)


def test_non_finite_metrics_are_null(tmp_path: Path) -> None:
    log = logs._MetricsFile(str(tmp_path / "metrics.jsonl"), 0, print)
    log.step(STEP)
    log.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["metrics"] == {"kl": 0.25, "unknown": None}
    assert line["grad_norm"] is None
    assert (line["fold_ratio"], line["logical_tokens_per_second"], line["physical_tokens_per_second"]) == (2, 4, 2)


def test_tensorboard_has_the_usual_names(tmp_path: Path) -> None:
    board = tmp_path / "board"
    job, overrides = objective_job(tmp_path, "grpo", {"kl_coef": 0.05})
    pytest.importorskip("tensorboard")
    notes = train(job, *overrides, f"log.tensorboard={board}", "train_iters=2")
    shown = scalars(board)
    for name in ("loss", "grad_norm", "lr", "fold_ratio"):
        assert shown[name] == curve(notes, name)
    assert shown["seconds/step"] == curve(notes, "seconds")
    assert shown["seconds/plan"] == curve(notes, "plan_seconds")
    for name in ("logical", "physical"):
        rates = [getattr(report, f"{name}_tokens") / report.seconds for report in notes.reports]
        assert shown[f"tokens_per_second/{name}"] == [
            (step, pytest.approx(rate)) for step, rate in enumerate(rates, start=1)
        ]
    of_objective = {name: value for name, value in shown.items() if name.startswith("objective/")}
    assert {name.partition("/")[2] for name in of_objective} == notes.reports[0].metrics.keys()
    assert of_objective["objective/reward"][0][1] == pytest.approx(notes.reports[0].metrics["reward"])
    assert len(shown) == 8 + len(of_objective)


def test_tensorboard_shows_no_step_twice_after_a_resume(job: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = (
        f"log.tensorboard={tmp_path / 'board'}",
        f"checkpoint.save={tmp_path / 'saved'}",
        "checkpoint.save_interval=2",
    )
    first = train(job, *options, stop_after=5)
    assert [step for step, _ in scalars(tmp_path / "board")["loss"]] == [1, 2, 3, 4, 5]
    second = train(job, *options, resume=True)
    losses = [*first.losses[:4], *second.losses]
    assert scalars(tmp_path / "board")["loss"] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses, start=1)
    ]
    seconds = [report.seconds for report in (*first.reports[:4], *second.reports)]
    shown = [value for _, value in scalars(tmp_path / "board")["seconds/step"]]
    assert shown == pytest.approx(seconds), "step 5 is the second run's"


def test_unwritable_tensorboard_folder_is_rejected_before_the_first_step(job: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "in_the_way").touch()
    result = run_command("train", job, f"log.tensorboard={tmp_path / 'in_the_way' / 'board'}", "train_iters=2", code=2)
    assert result.stderr == (
        f"error: log.tensorboard={tmp_path / 'in_the_way' / 'board'}: Not a directory; name a folder that can be "
        "written to\n"
    )
    assert "step 1" not in result.stdout


def test_missing_tensorboard_is_reported_before_the_run(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[:3] == ["torch", "utils", "tensorboard"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    board = tmp_path / "board"
    result = run_command("train", job, f"log.tensorboard={board}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: log.tensorboard={board} needs tensorboard: pip install 'tensorboard>=2.18', or unset it\n"
    )
    assert not board.exists()
