"""A faulty input, a command's outcome, and whether that is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_server import ENVIRONMENT, serve
from harness.forks import fork_context

LIMIT_S = 20.0
_LINES = 2
# How a warning of a field with an unusual name ends, which may come before the error.
_WARNING = " meant?"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command in a folder of ``files`` and a copy of ``base``, of which at most one is faulty.

    A file of None is removed. A refusal has to contain all ``names``, or one of a tuple. ``prepare`` is called with the
    folder. ``is_valid`` is by the suite's own rules; with ``same_output`` an accepted input is right only if standard
    output is that of the unchanged base, because the input carries checksums.
    """

    name: str
    reader: str
    arguments: Sequence[str]
    is_valid: bool
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    base: str | None = None
    stdin: bytes = b""
    prepare: Callable[[Path], None] | None = None
    names: Sequence[str | tuple[str, ...]] = ()
    same_output: bool = False

    @property
    def command(self) -> str:
        """The command's name."""
        return next((word for word in self.arguments if not word.startswith("-")), "") if self.arguments else ""


def make_case(
    reader: str, name: str, arguments: Sequence[str], names: Sequence[Any] = (), *, is_valid: bool = False, **more: Any
) -> Case:
    """Make a case whose refusal has to contain names."""
    names = () if is_valid else names
    return Case(reader=reader, name=name, arguments=arguments, names=names, is_valid=is_valid, **more)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a command: the exit status, negative for a signal and None if it had to be killed, and the output."""

    status: int | None
    stdout: str
    stderr: str
    seconds: float


# Possible outcomes of a case. The first two are right.
REFUSED, ACCEPTED = "refused in a sentence", "accepted, being valid"
FAULTS = ("traceback", "crash", "hang", "wrong status", "unclear sentence", "silent acceptance", "wrong refusal")


def judged(case: Case, outcome: Outcome, good_output: str | None = None) -> str:
    """Return the outcome of a case: one of :data:`REFUSED`, :data:`ACCEPTED` and :data:`FAULTS`."""
    if outcome.status is None:
        return "hang"
    if "Traceback (most recent call last)" in outcome.stderr + outcome.stdout:
        return "traceback"
    if outcome.status < 0:
        return "crash"
    if outcome.status == 0:
        if case.same_output:
            return ACCEPTED if outcome.stdout == good_output else "silent acceptance"
        return ACCEPTED if case.is_valid else "silent acceptance"
    if outcome.status not in (1, 2):
        return "wrong status"
    lines = [line for line in outcome.stderr.splitlines() if line.strip() and not line.endswith(_WARNING)]
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or len(lines) > _LINES or len(errors[0]) > 1000:
        return "unclear sentence"
    if case.is_valid:
        return "wrong refusal"
    wanted = [(name,) if isinstance(name, str) else name for name in case.names]
    is_named = all(any(name in errors[0] for name in names) for names in wanted)
    return REFUSED if is_named else "unclear sentence"


class Runner:
    """Runs cases in forks of one process, or each in a separate process."""

    def __init__(self, folder: Path, bases: Path) -> None:
        self._folder, self.bases = folder, bases
        self._good: dict[tuple[str, ...], str] = {}
        self._number = 0
        context = fork_context()
        self._connection, theirs = context.Pipe()
        self._server = context.Process(target=serve, args=(theirs,))
        self._server.start()
        theirs.close()
        assert self._connection.recv() == "ready"

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._server.join(10)

    def judge(self, case: Case, *, process: bool = False) -> tuple[str, Outcome]:
        """Run a case and judge it, perhaps as ``python -m mcore_prefix_tree`` in a separate process."""
        outcome = self.run(case, process=process)
        good = None
        if case.same_output and outcome.status == 0:
            key = (str(case.base), *case.arguments)
            if key not in self._good:
                unchanged = Case(name="good", reader="", arguments=case.arguments, base=case.base, is_valid=True)
                self._good[key] = self.run(unchanged).stdout
            good = self._good[key]
        return judged(case, outcome, good), outcome

    def run(self, case: Case, *, process: bool = False, limit_s: float = LIMIT_S) -> Outcome:
        """Run a case in a separate folder, which is removed afterwards."""
        self._number += 1
        place = self._folder / f"case{self._number}"
        work = place / "work"
        work.mkdir(parents=True)
        if case.base is not None:
            shutil.copytree(self.bases / case.base, work, dirs_exist_ok=True)
        for name, content in case.files.items():
            path = work / name
            if content is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        if case.prepare is not None:
            case.prepare(work)
        (place / "stdin").write_bytes(case.stdin)
        try:
            status, seconds = (self._in_a_process if process else self._in_a_fork)(case, place, limit_s)
            texts = [(place / name).read_bytes().decode("utf-8", "replace") for name in ("stdout", "stderr")]
        finally:
            shutil.rmtree(place)
        return Outcome(status=status, stdout=texts[0], stderr=texts[1], seconds=seconds)

    def _in_a_fork(self, case: Case, place: Path, limit_s: float) -> tuple[int | None, float]:
        request = {
            "arguments": list(case.arguments),
            "folder": str(place / "work"),
            **{name: str(place / name) for name in ("stdin", "stdout", "stderr")},
            "limit_s": limit_s,
        }
        self._connection.send(request)
        answer = self._connection.recv()
        return answer["status"], answer["seconds"]

    def _in_a_process(self, case: Case, place: Path, limit_s: float) -> tuple[int | None, float]:
        started = time.monotonic()
        with (
            (place / "stdin").open("rb") as stdin,
            (place / "stdout").open("wb") as stdout,
            (place / "stderr").open("wb") as stderr,
        ):
            try:
                status: int | None = subprocess.run(
                    [sys.executable, "-m", "mcore_prefix_tree", *case.arguments],
                    cwd=place / "work",
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    timeout=2 * limit_s,  # its imports take seconds on a busy machine
                    env={**os.environ, **ENVIRONMENT},
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        return status, time.monotonic() - started


@dataclass
class Table:
    """Counts of outcomes by reader, a description of each case that ended wrongly, and the slowest case's seconds."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, case: Case, verdict: str, outcome: Outcome) -> None:
        """Count a case."""
        self.counts.setdefault(case.reader, Counter())[verdict] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        if verdict not in (REFUSED, ACCEPTED):
            said = outcome.stderr.strip()[-600:] or outcome.stdout.strip()[-200:]
            self.faults.append(f"{verdict}: {case.reader}, {case.name} ({' '.join(case.arguments)})\n    {said}")

    def write(self, suite: str, **more: Any) -> None:
        """Write a part of the result that docs/correctness.md is rendered from, if $FAULTS_RESULT names its file."""
        if name := os.environ.get("FAULTS_RESULT"):
            path = Path(name)
            result = json.loads(path.read_text()) if path.exists() else {}
            rows = [{"reader": reader, "outcomes": dict(counts)} for reader, counts in sorted(self.counts.items())]
            result[suite] = {"rows": rows, "slowest_seconds": round(self.slowest, 1), **more}
            path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
