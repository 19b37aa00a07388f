"""The parent process of ``scripts/gpu_check``: the plan, the parts one after another, and the table at the end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_check_parts.arguments import RESULTS, parse
from gpu_check_parts.children import End, PartRun
from gpu_check_parts.context import ROOT
from gpu_check_parts.registry import Part
from gpu_check_parts.results import NOT_RUN, ResultFile
from gpu_check_parts.table import short_table

USAGE_ERROR = 2
PROBE_SECONDS = 120
# Seconds before the end for stopping a child, the last write and the table.
RESERVED_SECONDS = 8.0


class Log:
    """Lines for the user, which the log keeps too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def say(self, text: str) -> None:
        """Print lines; a closed standard output does not affect the measurements."""
        with suppress(BrokenPipeError):
            print(text, flush=True)
        with self.path.open("a") as stream:
            stream.write(f"{text}\n")


def started_at() -> float:
    """Return when the script was started, on the clock of :func:`time.monotonic`."""
    started = os.environ.get("GPU_CHECK_STARTED", "")
    return time.monotonic() - (max(0.0, time.time() - float(started)) if started else 0.0)


def ask_machine(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the findings of :mod:`gpu_check_parts.probe`, or the reason for its failure under ``failed``."""
    modules = dict.fromkeys(["torch", *(name for part in parts for name in (*part.imports, *part.wanted))])
    command = [sys.executable, "-m", "gpu_check_parts.probe", *modules]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"imports took longer than {PROBE_SECONDS} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"failed": done.stderr[-1000:] or f"exit code {done.returncode}"}
    return found


def plan(parts: Sequence[Part], missing: dict[str, str]) -> list[tuple[Part, str]]:
    """Return each part with the reason why it cannot run, or with an empty text."""
    found = []
    for part in parts:
        absent = [f"{name} ({missing[name]})" for name in part.imports if name in missing]
        absent += [f"{name} (not on the path)" for name in part.programs if shutil.which(name) is None]
        found.append((part, "missing: " + "; ".join(absent) if absent else ""))
    return found


def plan_text(planned: Sequence[tuple[Part, str]], missing: dict[str, str], minutes: float | None) -> str:
    """Return the plan for the user."""
    total = sum(part.minutes for part, reason in planned if not reason)
    lines = [f"plan: {total:.1f} minutes expected, {f'{minutes:g} given' if minutes else 'no limit'}"]
    for part, reason in planned:
        rows = [name for name in part.wanted if name in missing]
        note = reason or (f"without {', '.join(rows)}" if rows else "")
        lines.append(f"  {part.name:<10} {part.minutes:4.1f} min  {part.title}{f'  [{note}]' if note else ''}")
    return "\n".join(lines)


def run_parts(
    planned: Sequence[tuple[Part, str]], arguments: Any, results: ResultFile, end: End, log: Log
) -> tuple[bool, bool]:
    """Run the parts; return whether all of them ended, and whether no measurement failed."""
    well = True
    for part, reason in planned:
        if reason:
            results.put({**part.key._asdict(), "used": {}, NOT_RUN: reason})
            continue
        left = end.seconds_left()
        log.say(f"-- {part.name}" + (f", {left:.0f} s left" if left < float("inf") else ""))
        run = PartRun(part, arguments.options, results, end, log.path, log.say)
        ended = run.run()
        well &= not run.failed
        if not ended:
            return False, well
    return True, well


def main(given: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    arguments = parse(given)
    if arguments.pack is not None:
        from gpu_check_parts.pack import pack

        return pack(arguments.pack)
    if arguments.wheels is not None and "GPU_CHECK_WHEELS" not in os.environ:
        from gpu_check_parts.wheels import python_with

        python = python_with(arguments.wheels)
        sys.stdout.flush()
        os.execve(python, [str(python), "-m", "gpu_check_parts", *given], os.environ | {"GPU_CHECK_WHEELS": "used"})
    found = ask_machine(arguments.parts)
    if arguments.runs_fa4:
        return 0 if found.get("runs_fa4") else 1
    if not found.get("gpu"):
        print(f"gpu_check: {_unusable(found)}", file=sys.stderr)
        return USAGE_ERROR
    return _check(arguments, found, given)


def _unusable(found: dict[str, Any]) -> str:
    """Return why this Python or this machine cannot measure, and the way out."""
    if "failed" in found:
        return str(found["failed"])
    if "torch" in found["missing"]:
        way_out = "name a Python with torch: PYTHON=/path/to/python"
        return f"torch does not import in {sys.executable} ({found['missing']['torch']}); {way_out}"
    return "torch sees no GPU; run it on a machine with one"


def _check(arguments: Any, found: dict[str, Any], given: Sequence[str]) -> int:
    name = ("smoke_" if arguments.smoke else "") + found["file"]
    limit = float("inf") if arguments.minutes is None else 60 * arguments.minutes - RESERVED_SECONDS
    end = End(started_at() + limit)
    earlier = RESULTS / f"{name}.json"
    try:
        results = ResultFile(arguments.output / f"{name}.json", found["machine"], earlier)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return USAGE_ERROR
    log = Log(arguments.output / f"{name}.log")
    log.say(f"scripts/gpu_check {shlex.join(given)}")
    log.say(" ".join(f"{key}={value}" for key, value in found["machine"].items()))
    planned = plan(arguments.parts, found["missing"])
    log.say(plan_text(planned, found["missing"], arguments.minutes))
    before = {number: signal.signal(number, end.ask) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    results.write()
    ended, well = run_parts(planned, arguments, results, end, log)
    code = 0 if well else 1
    if end.signal is not None:
        log.say(f"stopped by {signal.Signals(end.signal).name}")
        code = 128 + end.signal
    elif not ended:
        log.say("time is up; call it again to continue")
    results.write()
    log.say(f"{results.path}: {len(results.rows)} rows; scripts/render_results.py puts them into the documents")
    log.say(short_table(results.rows))
    for number, handler in before.items():
        signal.signal(number, handler)
    return code
