"""A script's help describes it, and does nothing else."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from harness.commands import run_process

ROOT = Path(__file__).parents[2]
SHELL = ["docs", "extras", "gpu_check", "quickstart", "same_steps", "test", "versions"]
PYTHON = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))


def run(*command: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_process([str(word) for word in command], env=variables, cwd=cwd)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("name", SHELL)
def test_help_of_a_shell_script_is_its_header(tmp_path: Path, name: str, option: str) -> None:
    """Before anything is installed: no Python runs."""
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    python.chmod(0o755)
    for words in ([option], ["--only", option]):
        done = run(os.path.relpath(ROOT / "scripts" / name, tmp_path), *words, cwd=tmp_path, PYTHON=str(python))
        assert (done.returncode, done.stderr) == (0, "")
        top = (ROOT / "scripts" / name).read_text().partition("\n#")[2].partition("\nset -")[0]
        assert done.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in top.splitlines()]
        assert f"scripts/{name} " in done.stdout
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("name", ["docs", "extras", "versions"])
def test_wrong_argument_is_reported_before_an_installation(tmp_path: Path, name: str) -> None:
    done = run(ROOT / "scripts" / name, "nope", cwd=tmp_path, PYTHON=f"{tmp_path}/no-python")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nope" in done.stderr
    assert "Python" not in done.stderr


def test_help_behind_two_dashes_is_for_another_program(tmp_path: Path) -> None:
    done = run(ROOT / "scripts" / "gpu_check", "--", "--help", cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2
    assert "/bin/false is not Python 3.10 or newer" in done.stderr


@pytest.mark.parametrize("name", PYTHON)
def test_help_of_a_python_script_changes_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported most of their modules."""
    wanted = [ROOT / "README.md", ROOT / "recipes" / "data"]
    before = [path.stat().st_mtime_ns for path in wanted]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / name), "--help"])
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    assert not ended.value.code
    assert f"usage: {name}".lower() in capsys.readouterr().out.lower()
    assert [path.stat().st_mtime_ns for path in wanted] == before
    assert not list(tmp_path.iterdir())


def test_same_steps_finds_the_last_bit_of_a_loss_and_a_weight() -> None:
    compare = runpy.run_path(str(ROOT / "scripts" / "lib" / "same_steps.py"))["compare"]
    run = {
        "steps": [{"loss": 0.1, "grad_norm": 1.0}, {"loss": 0.2, "grad_norm": 1.0}],
        "weights": {"w": "ab", "b": "c"},
    }
    assert compare(run, run) == "same"
    steps = [run["steps"][0], {"loss": math.nextafter(0.2, 1), "grad_norm": 1.0}]
    assert compare(run, run | {"steps": steps}) == "DIFFERS: line 2 of the metrics, loss: 0.2 and 0.20000000000000004"
    assert compare(run, run | {"steps": steps[:1]}) == "DIFFERS: 2 and 1 lines of metrics"
    assert compare(run, run | {"weights": {"w": "ab"}}) == "DIFFERS: 1 tensors of the checkpoint, first b"
    assert compare(run, run | {"weights": {"w": "ad", "b": "c"}}) == "DIFFERS: 1 tensors of the checkpoint, first w"
