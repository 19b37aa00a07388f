"""Child processes of ``gpu_check``: one per part, stopped when the time of a measurement or of the run is up."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_check_parts.context import ROOT, START_AGAIN, Options
from gpu_check_parts.registry import Part
from gpu_check_parts.results import FAILED, Key, ResultFile

# Seconds between SIGTERM and SIGKILL.
GRACE_SECONDS = 3.0
# A part whose child repeatedly ends at its first measurement is abandoned.
MOST_STARTS = 20


class Child:
    """A running part; ``lines`` are those that it sends, and None when it has closed the pipe."""

    def __init__(self, command: list[str], asked: dict[str, Any], log: Path) -> None:
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._is_stopped = False
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        reading, writing = os.pipe()
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as self._asked:
            json.dump(asked, self._asked)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, self._asked.name, str(writing)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[writing],
                # A process group includes the processes that it starts; a session would outlive this process.
                preexec_fn=os.setpgrp,
            )
        os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as stream:
            for line in stream:
                with suppress(ValueError):  # cut off by a kill
                    self.lines.put(json.loads(line))
        self.lines.put(None)

    def stop(self) -> int:
        """End the process and all processes that it has started; return its exit code."""
        if self._is_stopped:
            return self.process.wait()
        self._is_stopped = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        Path(self._asked.name).unlink(missing_ok=True)
        return self.process.wait()

    def rest(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of a process that has ended, as far as nobody has read them."""
        self._reader.join(GRACE_SECONDS)
        with suppress(queue.Empty):
            while True:
                line = self.lines.get_nowait()
                if line is not None:
                    yield line

    def said(self) -> str:
        """Return the end of its log."""
        with self._log.open("rb") as stream:
            stream.seek(max(self._log_start, stream.seek(0, os.SEEK_END) - 4000))
            lines = stream.read().decode(errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines if line.strip())[-500:]


class End:
    """When measurements end: at a time of :func:`time.monotonic`, or when a signal asks for it."""

    def __init__(self, at: float) -> None:
        self._at = at
        self.signal: int | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: no exception, which could lose a row that was just read."""
        self.signal = number

    def seconds_left(self) -> float:
        """Return how long measurements may take, 0 or less if they should end."""
        return 0.0 if self.signal is not None else self._at - time.monotonic()


class PartRun:
    """One part, in as many processes as necessary: a measurement that crashes or hangs does not affect the others."""

    def __init__(
        self, part: Part, options: Options, results: ResultFile, end: End, log: Path, say: Callable[[str], None]
    ) -> None:
        self._part, self._options, self._results = part, options, results
        self._end, self._log, self._say = end, log, say
        self._skip: set[Key] = set()
        results.drop(part.key)
        self._child: Child | None = None
        self.failed: set[Key] = set()

    def run(self) -> bool:
        """Run to the end; return False if time is up earlier."""
        try:
            for _ in range(MOST_STARTS):
                again = self._run_child()
                if again is not None:
                    return not again
            self._fail(self._part.key, f"gave up after {MOST_STARTS} processes")
            return True
        finally:
            if self._child is not None:
                self._child.stop()
                for line in self._child.rest():  # measured just before a signal, or the end of the time
                    if "row" in line:
                        self._take(line["row"])

    def _run_child(self) -> bool | None:
        """Run one process. True: time is up. False: the part has ended. None: another process should continue."""
        part = self._part
        asked = {
            "function": part.function,
            "rows": part.rows,
            "options": asdict(self._options),
            "device_name": self._results.machine["device"],
            "earlier": [row for key, row in self._results.rows.items() if key.part == part.rows],
            "skip": sorted(self._skip),
        }
        self._child = child = Child([sys.executable, "-m", "gpu_check_parts.child"], asked, self._log)
        current, started = self._part.key, time.monotonic()
        while True:
            if self._end.seconds_left() <= 0:
                child.stop()
                return True
            if time.monotonic() - started > part.row_seconds:
                child.stop()
                self._fail(current, f"stopped after {part.row_seconds:.0f} s without a result")
                return False if current == self._part.key else None
            try:
                line = child.lines.get(timeout=0.1)
            except queue.Empty:
                continue
            if line is None:
                return self._ended(child, current)
            if "started" in line:
                current = Key(*line["started"])
            elif "row" in line:
                self._take(line["row"])
                current = self._part.key
            started = time.monotonic()
            if "finished" in line:
                child.stop()
                return False

    def _ended(self, child: Child, current: Key) -> bool | None:
        """Handle a process that ended before its part did; see :meth:`_run_child`."""
        code = child.stop()
        if code == START_AGAIN:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._fail(current, f"its process ended with {how}: {child.said()}")
        return False if current == self._part.key else None

    def _take(self, row: dict[str, Any]) -> None:
        self._results.put(row)
        key = Key(*(row[name] for name in Key._fields))
        if FAILED in row:
            self._skip.add(key)
            self.failed.add(key)
        self._say(f"{key.text}: {summary_of(row)}")

    def _fail(self, key: Key, reason: str) -> None:
        self._take({**key._asdict(), "used": {}, FAILED: reason})


def summary_of(row: dict[str, Any]) -> str:
    """Return a phrase that describes a row."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    if "not_run" in row:
        return f"not run: {row['not_run']}"
    return str(row.get("shown", "measured"))
