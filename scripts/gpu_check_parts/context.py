"""The context of a part: options, the rows of earlier runs, and the line to the parent process."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_check_parts.results import FAILED, NOT_RUN, Key, is_measured, key_of

ROOT = Path(__file__).parents[2]
# Exit code of a child that requests a new process: after some errors, CUDA rejects all work.
START_AGAIN = 75


@dataclass(frozen=True)
class Options:
    """Options of the command line that parts read."""

    smoke: bool = False  # so small that every part runs within seconds; its figures are meaningless
    repeats: int = 5
    workloads: tuple[str, ...] = ()  # parts of names of those to measure; empty for all
    data: str | None = None

    def wants(self, workload: str) -> bool:
        """Return whether a workload is requested."""
        return not self.workloads or any(name in workload for name in self.workloads)


@dataclass
class Context:
    """One part's run in a child process."""

    part: str  # first part of its rows' keys
    options: Options
    device_name: str
    earlier: list[dict[str, Any]] = field(default_factory=list)  # rows of the result file
    skip: frozenset[Key] = frozenset()  # that this run has abandoned
    stream: int = 1  # file descriptor for lines to the parent

    def __post_init__(self) -> None:
        self._earlier = {key_of(row): row for row in self.earlier}

    def key(self, workload: str, method: str, mode: str = "") -> Key:
        return Key(self.part, workload, method, mode)

    def used(self, *packages: str, sources: tuple[str, ...] = (), **settings: object) -> dict[str, str]:
        """Return the dependencies of a row: the GPU, installed versions, a hash of our sources, settings."""
        found = {"gpu": self.device_name, "smoke": "yes"} if self.options.smoke else {"gpu": self.device_name}
        for package in packages:
            with suppress(PackageNotFoundError):
                found[package] = version(package)
        if sources:
            found["sources"] = hash_of(sources)
        return found | {name: str(value) for name, value in settings.items()}

    def is_done(self, key: Key, used: Mapping[str, str]) -> bool:
        """Return whether a key was measured before with the same dependencies, or is abandoned in this run."""
        row = self._earlier.get(key)
        return key in self.skip or (row is not None and is_measured(row) and row["used"] == used)

    def measure(
        self,
        key: Key,
        used: Mapping[str, str],
        run: Callable[[], dict[str, Any] | str],
        *,
        also: Mapping[str, Any] | None = None,
    ) -> bool:
        """Run a measurement, send its row and return whether it has figures.

        ``run`` returns the figures, or the reason for a row without figures, which has the entries ``also``.
        """
        self._send({"started": key})
        started = time.perf_counter()
        broken = False
        try:
            found = run()
        except Exception as error:
            broken = not _is_device_alive()
            found = {FAILED: reason_of(error)}
        if isinstance(found, str):
            found = {NOT_RUN: found}
        row = {**key._asdict(), "used": dict(used), "took": round(time.perf_counter() - started, 3), **found}
        if not is_measured(found) and "unfinished" not in found:
            row |= also or {}
        self._put(row)
        if broken:
            os._exit(START_AGAIN)
        return FAILED not in found and NOT_RUN not in found

    def leave_out(self, key: Key, used: Mapping[str, str], reason: str, **also: Any) -> None:
        """Send a row with the reason why a measurement is not made."""
        self._put({**key._asdict(), "used": dict(used), NOT_RUN: reason, **also})

    def _put(self, row: dict[str, Any]) -> None:
        self._earlier[key_of(row)] = row
        self._send({"row": row})

    def _send(self, line: dict[str, Any]) -> None:
        os.write(self.stream, (json.dumps(line, default=str) + "\n").encode())


class LocalContext(Context):
    """A part's run in this process; ``rows`` are its rows by key."""

    def __init__(self, part: str, options: Options) -> None:
        super().__init__(part=part, options=options, device_name="cpu")
        self.rows: dict[Key, dict[str, Any]] = {}

    def _send(self, line: dict[str, Any]) -> None:
        if "row" in line:
            self.rows[key_of(line["row"])] = line["row"]


def reason_of(error: BaseException) -> str:
    """Return an error as one line."""
    if type(error).__name__ == "OutOfMemoryError":
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def hash_of(sources: tuple[str, ...]) -> str:
    """Return a short hash of the Python files in folders and files of the repository; FileNotFoundError without any."""
    found = hashlib.sha256()
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) or [path]:
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


def _is_device_alive() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
