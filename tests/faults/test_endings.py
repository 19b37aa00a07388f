"""Every way to end a run keeps its checkpoints, and resumes to the same bits as a run that nothing disturbed.

``ENDINGS_RESULT=benchmarks/results/endings.json`` writes the result that docs/correctness.md is rendered from.
"""

from __future__ import annotations

import fcntl
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.checkpoints import plain_content
from harness.commands import run_process
from killed_jobs import (
    LIMIT_S,
    STAGES,
    STEPS,
    STREAMED,
    Case,
    Outcome,
    command,
    last_saved,
    run,
    settings_of,
    write_job,
    write_result,
)

from mcore_prefix_tree.cpu.emulation import single_process
from mcore_prefix_tree.settings import load_recipe

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2

QUICK = [
    Case("reading data", INT, "group"),
    Case("later save: tensors", TERM, "group"),
    Case("later save: tracker", KILL, "process"),
    Case("step", KILL, "other rank", ranks=2),
]


def all_cases() -> list[Case]:
    rng = random.Random(18)
    cases = []
    for stage in STAGES:
        targets = [(number, target) for number in (INT, HUP, USR1, USR2) for target in ("process", "group")]
        cases += [Case(stage, TERM, "group"), Case(stage, KILL, "process")]
        cases += [Case(stage, *one) for one in rng.sample(targets, 1)]
    for stage, number in (("step", TERM), ("later save: tensors", HUP), ("first save: tracker", KILL)):
        cases.append(Case(stage, number, "group" if number != KILL else "process", settings=STREAMED))
    for stage in ("step", "first save: tensors", "later save: tensors"):
        ways = [(TERM, "launcher"), (KILL, "other rank"), (USR1, "process")]
        cases += [Case(stage, *way, ranks=2) for way in ways]
    return [one for one in cases if one not in QUICK]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("endings"))


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    yield found
    if name := os.environ.get("ENDINGS_RESULT"):
        write_result(name, found)


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: None


def finish(recipe: Path, saved: Path, case: Case) -> dict[str, Any]:
    """Continue a job to its end, undisturbed; returns its last checkpoint."""
    from mcore_prefix_tree.mcore.loop.jobs import run_train

    if case.ranks > 1:
        run_process(
            command(recipe, saved, case, "--resume", signalled=False), env={"OMP_NUM_THREADS": "1"}, timeout=300, code=0
        )
    else:
        run_train(load_recipe(recipe, settings_of(case, saved)), Silent(), resume=True)
    with single_process():
        return plain_content(saved / f"iter_{STEPS:07d}")


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Any:
    """The last checkpoint of a run that nothing disturbs, by its ranks and settings."""
    known: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        key = case.ranks, case.settings
        if key not in known:
            known[key] = finish(recipe, recipe.with_name(f"undisturbed_{len(known)}"), case)
        return known[key]

    return of


def check(case: Case, recipe: Path, saved: Path, undisturbed: Any, outcomes: list[dict[str, Any]]) -> None:
    outcome = run(recipe, saved, case)
    verdict = "failed"
    try:
        check_ending(outcome, last_saved(saved))
        final, expected = finish(recipe, saved, case), undisturbed(case)
        assert final.keys() == expected.keys()
        assert not [name for name, value in expected.items() if not is_same(final[name], value)]
        verdict = "same bits"
    finally:
        outcomes.append(outcome.row | {"outcome": verdict})
    shutil.rmtree(saved)


def check_ending(outcome: Outcome, saved: int | None) -> None:
    case, told = outcome.case, f"{outcome.out[-2000:]}\n{outcome.err[-4000:]}"
    stage, killed = STAGES[case.stage], case.signal == KILL
    assert outcome.alive == (), "something outlives the job"
    assert outcome.seconds < LIMIT_S, told
    assert len(outcome.own_words) <= 2, told
    assert "/mcore_prefix_tree/" not in outcome.err, f"a traceback: {told}"
    if case.ranks == 1:
        # Before the first step signals end the process as any other; Python turns Ctrl-C into an error.
        at_once = stage.ended is None and case.signal != INT
        assert outcome.status == (-case.signal if killed or at_once else 128 + case.signal), told
        assert saved == (stage.killed if killed else stage.ended), told
    else:
        assert outcome.status != 0, "a scheduler would take the job for done"
        assert (saved or 0) >= (stage.killed or 0), told


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else repr(one) == repr(other)


def marks_of(case: Case) -> Any:
    """A killed process is the default, a killed rank is for CI."""
    return pytest.mark.slow if case.signal != KILL else pytest.mark.ci if case.ranks > 1 else ()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks_of(case)) for case in QUICK])
def test_ended_run_keeps_its_checkpoints_and_resumes(
    case: Case, recipe: Path, tmp_path: Path, undisturbed: Any, outcomes: list[dict[str, Any]]
) -> None:
    check(case, recipe, tmp_path / "saved", undisturbed, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_ended_run_keeps_its_checkpoints_and_resumes(
    case: Case, recipe: Path, tmp_path: Path, undisturbed: Any, outcomes: list[dict[str, Any]]
) -> None:
    check(case, recipe, tmp_path / "saved", undisturbed, outcomes)


def shell(words: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which ``$@`` is the command line with its arguments."""
    return run_process(
        ["bash", "-c", words, "bash", sys.executable, "-m", "mcore_prefix_tree", *arguments],
        env={"OMP_NUM_THREADS": "1"},
        timeout=120,
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        pytest.param('"$@" | head -1; exit ${PIPESTATUS[0]}', id="a reader that goes away"),
        pytest.param('"$@" > /dev/full', id="a full device", marks=pytest.mark.slow),
    ],
)
def test_training_outlives_its_output(recipe: Path, tmp_path: Path, words: str) -> None:
    done = shell(words, "train", str(recipe), f"checkpoint.save={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert last_saved(tmp_path) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("heeded", [True, False], ids=["SIGHUP", "no signal, under nohup"])
def test_training_outlives_its_terminal(recipe: Path, tmp_path: Path, heeded: bool) -> None:
    ours, theirs = pty.openpty()

    def on_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL if heeded else signal.SIG_IGN)

    iterations = 3000 if heeded else 40
    settings = (f"checkpoint.save={tmp_path}", "checkpoint.save_interval=100000", "validation.path=null")
    arguments = ("-m", "mcore_prefix_tree", "train", str(recipe), *settings, f"train_iters={iterations}")
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=on_the_terminal,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        os.close(theirs)
        printed = b""
        while b"step 3" not in printed:
            printed += os.read(ours, 4096)
        os.close(ours)
        status = process.wait(timeout=LIMIT_S)
    saved = last_saved(tmp_path)
    if heeded:
        assert status == 128 + HUP
        assert saved in range(3, iterations)
    else:
        assert (status, saved) == (0, iterations)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ('"$@" | head -c 1 > /dev/null; exit ${PIPESTATUS[0]}', (0, 1)),
        ('"$@" | true; exit ${PIPESTATUS[0]}', (1,)),
    ],
)
def test_command_without_its_output_ends_quietly(recipe: Path, words: str, status: tuple[int, ...]) -> None:
    done = shell(words, "inspect", str(recipe.with_name("data.jsonl")))
    assert (done.returncode in status, done.stderr) == (True, ""), (done.returncode, done.stderr)
