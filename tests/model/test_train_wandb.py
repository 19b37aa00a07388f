"""Data of a run for Weights & Biases: by a stand-in that records its calls, and by the real client offline."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command, run_process
from harness.train_jobs import train

# The part of the client's interface that is used, with the same names and parameters.
STAND_IN = """
import json, os
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")

def note(**call):
    with CALLS.open("a") as stream:
        stream.write(json.dumps(call) + "\\n")

class Settings:
    def __init__(self, *, silent, console):
        note(settings=[silent, console])

class Run:
    def __init__(self, id):
        self.id, self.offline, self.dir, self.url = id, False, "folder", f"https://wandb.example/{id}"
    def define_metric(self, name, step_metric=None):
        note(metric=[name, step_metric])
    def log(self, numbers):
        if numbers["iteration"] == int(os.environ.get("WANDB_FAILS_AT", -1)):
            raise ConnectionError("no network")
        note(log=numbers)
    def finish(self, exit_code):
        note(finish=exit_code)

def init(*, project, id, resume, config, settings):
    if "WANDB_FAILS" in os.environ:
        raise RuntimeError("No API key configured\\nlong advice")
    note(init={"project": project, "id": id, "resume": resume, "config": config})
    return Run(id or f"run{sum(1 for line in CALLS.open() if 'init' in line)}")
"""


class Calls:
    """The stand-in's calls."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, name: str) -> list[Any]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [call[name] for call in map(json.loads, lines) if name in call]


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield Calls(package / "calls.jsonl")
    sys.modules.pop("wandb", None)


def test_a_project_receives_every_step_and_the_recipe(job: Path, wandb: Calls, tmp_path: Path) -> None:
    held_out = f"validation={{path: {tmp_path / 'data.jsonl'}, eval_interval: 2}}"
    notes = train(job, "log.wandb=trees", "train_iters=2", "seed=7", held_out)
    (init,) = wandb.of("init")
    assert (init["project"], init["id"], init["resume"]) == ("trees", None, None)
    assert (init["config"]["seed"], init["config"]["model"]["dtype"]) == (7, "float32")
    steps = [numbers for numbers in wandb.of("log") if "loss" in numbers]
    assert [(numbers["iteration"], numbers["loss"]) for numbers in steps] == [
        (one.iteration, one.loss) for one in notes.reports
    ]
    assert {"lr", "fold_ratio", "tokens_per_second/logical", "seconds/step", "seconds/plan"} <= steps[0].keys()
    losses = [(one["iteration"], one["validation/loss"]) for one in wandb.of("log") if "validation/loss" in one]
    assert losses == [(one.iteration, one.loss) for one in notes.evaluations]
    assert wandb.of("metric") == [["iteration", None], ["*", "iteration"]]
    assert wandb.of("finish") == [0]
    assert "log.wandb=trees: run run1 in https://wandb.example/run1" in notes.told


def test_a_resumed_run_continues_its_run(job: Path, wandb: Calls, tmp_path: Path) -> None:
    saving = ("log.wandb=trees", f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=2")
    train(job, *saving, stop_after=3)
    train(job, *saving, resume=True)
    assert [(one["id"], one["resume"]) for one in wandb.of("init")] == [(None, None), ("run1", "allow")]
    assert [one["iteration"] for one in wandb.of("log")] == [1, 2, 3, 3, 4, 5, 6]
    assert wandb.of("finish") == [1, 0], "the first was interrupted"


def test_failed_wandb_start_is_reported_before_the_first_step(
    job: Path, wandb: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_FAILS", "1")
    done = run_command("train", job, "log.wandb=trees", "train_iters=2")
    assert (done.exit_code, "step 1" in done.stdout) == (2, False)
    assert done.stderr == (
        "error: log.wandb=trees: No API key configured; log in with wandb login, or set WANDB_MODE=offline\n"
    )


def test_a_lost_network_ends_no_run(job: Path, wandb: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_FAILS_AT", "2")
    notes = train(job, "log.wandb=trees", "train_iters=3")
    assert "log.wandb=trees: no network; the run continues without it" in notes.told
    assert len(notes.reports) == 3
    assert [one["iteration"] for one in wandb.of("log")] == [1]


def test_missing_wandb_is_reported_before_the_run(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder by that name, which the client creates in its working directory, is not the client."""
    (tmp_path / "cwd" / "wandb").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path / "cwd"), *without_wandb()])
    done = run_command("train", job, "log.wandb=trees")
    assert (done.exit_code, done.stdout) == (2, "")
    # The path lacks this package's metadata too: if it is read from a clone, the clone's extra is named.
    wanted = r"(wandb>=0\.19|/.*\[wandb\])"
    assert re.fullmatch(f"error: log.wandb=trees needs wandb: pip install '{wanted}', or unset it\n", done.stderr)


def without_wandb() -> list[str]:
    return [path for path in sys.path if not (Path(path) / "wandb").is_dir()]


@pytest.mark.ci
def test_the_real_client_writes_offline(job: Path, tmp_path: Path) -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    words = ["train", str(job), "log.wandb=trees", f"checkpoint.save={tmp_path / 'saved'}", "train_iters=2"]
    done = run_process(
        [sys.executable, "-m", "mcore_prefix_tree", *words], env={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    name = (tmp_path / "saved" / "wandb_run_id").read_text().strip()
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    assert b"tokens_per_second/logical" in file.read_bytes()
