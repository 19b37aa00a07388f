"""Arguments and terminals that make no sense: numbers without a limit, unknown options, no columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command, write_rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data.jsonl", ({"tokens": [*range(20), 40 + row]} for row in range(8)))


def cli(*arguments: object, **environment: str) -> Any:
    return run_command(*arguments, env=environment)


HUGE = 10**30
NUMBERS = [
    *(("plan", option) for option in ("--max-tokens", "--dp", "--micro-batches", "--global-batch-size", "--seed")),
    *(("inspect", option) for option in ("--trees", "--min-shared-tokens")),
    *(("score", option) for option in ("--teacher-top-k",)),
    *(("bench step", option) for option in ("--repeats",)),
    *(("xtoken build-projection", option) for option in ("--top-k", "--tokens-kept")),
    *(("xtoken inspect-alignment", option) for option in ("--samples", "--chunks")),
    *(("xtoken trim", option) for option in ("--top-k",)),
    *(("xtoken export-teacher", option) for option in ("--top-k",)),
]


@pytest.mark.parametrize(("command", "option"), NUMBERS)
@pytest.mark.parametrize("value", [HUGE, -1, "x"])
def test_numbers_have_limits_that_are_named(data: Path, command: str, option: str, value: object) -> None:
    done = cli(*command.split(), data, option, value)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: Invalid value for '{option}': ")
    assert line.endswith(f" {command} --help")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan"], "error: Missing argument 'FILE...'; see "),
        (["plan", "x.jsonl", "--nope"], "error: No such option: --nope"),
        (["nope"], "error: No such command 'nope'"),
        (["--nope"], "error: No such option: --nope"),
        (["plan", "x.jsonl", "--order", "random"], "error: Invalid value for '--order': "),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments: list[str], says: str) -> None:
    done = cli(*arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(says)


def test_a_group_without_a_command_shows_its_help() -> None:
    for arguments in ([], ["bench"], ["xtoken"]):
        done = cli(*arguments)
        assert "Usage: " in done.output
        assert done.exit_code == 2
        assert "error:" not in done.output
        assert done.stderr == ""


def test_the_most_micro_batches_are_named(data: Path) -> None:
    done = cli("plan", data, "--max-tokens", 64, "--dp", 2**14, "--micro-batches", 8)
    assert done.stderr == "error: --dp 16384 with --micro-batches 8: at most 65,536 are planned\n"


@pytest.mark.ci
def test_the_most_ranks_are_planned_for(data: Path) -> None:
    done = cli("plan", data, "--max-tokens", 64, "--dp", 2**14, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["idle_ranks"] == 2**14 - 8
