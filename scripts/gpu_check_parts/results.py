"""The result file: one row per measurement, complete on disk after each of them.

A row has a key (part, workload, method, mode) and its dependencies under ``used``: the GPU, versions of packages, a
hash of our sources, settings. A later run keeps the rows with the same ``used`` and measures the others again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LARGEST_BYTES = 1 << 20
# Longest message; a compiler's traceback can be longer than all figures together.
LONGEST_TEXT = 600
FAILED, NOT_RUN = "failed", "not_run"


class Key(NamedTuple):
    """Name of a measurement, one per row. ``workload``, ``method`` and ``mode`` may be empty."""

    part: str
    workload: str
    method: str
    mode: str

    @property
    def text(self) -> str:
        return ", ".join(filter(None, self))


def key_of(row: Mapping[str, Any]) -> Key:
    return Key(*(str(row.get(name, "")) for name in Key._fields))


class ResultFile:
    """Rows of one GPU by key, in the order of their first measurement; ``left_out`` keys found no room in the file."""

    def __init__(self, path: Path, machine: Mapping[str, Any], earlier: Path | None = None) -> None:
        self.path = path
        self.machine = dict(machine)
        self.rows: dict[Key, dict[str, Any]] = {}
        self.left_out: list[str] = []
        for file in dict.fromkeys((earlier, path)):
            if file is not None and file.exists():
                self.rows |= {key_of(row): row for row in rows_of(file)}

    def put(self, row: dict[str, Any]) -> None:
        """Add or replace a row, and write the file. A row without figures never replaces a row with figures."""
        key = key_of(row)
        if NOT_RUN in row and is_measured(self.rows.get(key, row)):
            return
        self.rows[key] = _tidied(row)
        if len(self._text()) > LARGEST_BYTES:
            del self.rows[key]
            self.left_out.append(key.text)
        self.write()

    def drop(self, key: Key) -> None:
        """Remove a row, if there is one."""
        self.rows.pop(key, None)

    def write(self) -> None:
        """Replace the file atomically, so that it is always complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with unfinished.open("w") as stream:
                stream.write(self._text())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _text(self) -> str:
        head = {"kind": "gpu_check", "machine": self.machine, "left_out": self.left_out[-20:]}
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in self.rows.values())
        return f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file; raise ValueError, with its name, for another file."""
    try:
        content = json.loads(file.read_text())
        rows: list[dict[str, Any]] = content["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a result of scripts/gpu_check; move it to another folder") from error
    return rows


def is_measured(row: Mapping[str, Any]) -> bool:
    """Return whether a row has all its figures."""
    return not ({FAILED, NOT_RUN, "unfinished"} & row.keys())


def _tidied(value: Any) -> Any:
    """Return a value for JSON: shortened texts, and only finite numbers."""
    if isinstance(value, Mapping):
        return {str(name): _tidied(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tidied(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        return f"{value[:half]} ... {value[-half:]}"
    return value
