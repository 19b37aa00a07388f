"""Convert rows to the input of ``scripts/render_results.py``, which writes the tables of the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check_parts.results import FAILED, NOT_RUN

_OF_ATTENTION = (
    *("layout", "deterministic", "tokens", "pairs", "forward_seconds", "backward_seconds", "metadata_seconds"),
    *("peak_bytes", "tile_efficiency", "difference", "parts"),
)
_OF_WAY = ("gradient_error", "peak_bytes", "bytes_per_logit", "seconds", "median_seconds")
_OF_HEAD = ("rows", "hidden", "vocab", "supervised")


def sections_of(file: Path) -> dict[str, Any]:
    """Return ``machine`` and, for each part with figures, the result in the format of that part's own benchmark."""
    content = json.loads(file.read_text())
    return sections(content["machine"], content["rows"])


def sections(machine: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the same of rows."""
    makers = {"tests": _tests, "attention": _attention, "steps": _steps, "head": _head}
    found: dict[str, Any] = {"kind": "gpu_check", "machine": dict(machine)}
    for part, make in makers.items():
        own = [row for row in rows if row["part"] == part]
        made = make(own, machine)
        if made is not None:
            found[part] = made
    return found


def _tests(rows: list[dict[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any] | None:
    counted = [row for row in rows if "tests" in row]
    names = ("tests", "failures", "errors", "skipped", "seconds")
    return {name: sum(row[name] for row in counted) for name in names} if counted else None


def _attention(rows: list[dict[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any] | None:
    ceilings = next((row for row in rows if row["method"] == "ceilings" and "matrix_tflops" in row), None)
    workloads = [_workload(one, rows) for one in rows if one["method"] == "shape" and "pairs" in one]
    workloads = [one for one in workloads if one["rows"]]
    settings = next((row["settings"] for row in rows if "settings" in row), None)
    if ceilings is None or settings is None or not workloads:
        return None
    return {
        "kind": "attention",
        "machine": dict(machine),
        "settings": settings,
        "ceilings": {name: ceilings[name] for name in ("matrix_tflops", "copy_gbytes")},
        "workloads": workloads,
    }


def _workload(shape: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    own = [row for row in rows if row["workload"] == shape["workload"]]
    measured = [row for row in own if row.get("forward_seconds") and FAILED not in row]
    # Rounds are compared in pairs, so a forest keeps the rounds that all of its rows have.
    rounds = min((len(row["backward_seconds"]) for row in measured), default=0)
    return {
        "name": shape["workload"],
        **{name: shape[name] for name in ("tokens", "pairs", "unfolded_tokens", "unfolded_pairs", "nodes", "shape")},
        "rows": [
            {"method": row["name"], **{name: _cut(row[name], rounds) for name in _OF_ATTENTION}} for row in measured
        ],
        "missing": [
            {"method": row["name"], "layout": row["layout"], "reason": row.get(FAILED) or row[NOT_RUN]}
            for row in own
            if "name" in row and (FAILED in row or NOT_RUN in row)
        ],
    }


def _cut(value: Any, rounds: int) -> Any:
    return value[:rounds] if isinstance(value, list) else value


def _steps(rows: list[dict[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any] | None:
    return {row["workload"]: row["result"] for row in rows if "result" in row} or None


def _head(rows: list[dict[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any] | None:
    cases: dict[str, dict[str, Any]] = {}
    missing = {}
    measured = [row for row in rows if "seconds" in row]
    for row in measured:
        case = cases.setdefault(row["workload"], {name: row[name] for name in _OF_HEAD} | {"ways": {}})
        rounds = min(len(other["seconds"]) for other in measured if other["workload"] == row["workload"])
        case["ways"][row["method"]] = {name: _cut(row[name], rounds) for name in _OF_WAY if name in row}
    for row in rows:
        if FAILED in row and row["workload"] in cases:
            cases[row["workload"]]["ways"][row["method"]] = {"failed": row[FAILED]}
        elif NOT_RUN in row and row["workload"]:
            missing[row["method"]] = row[NOT_RUN]
    if not cases:
        return None
    on_cpu = machine["device"] == "cpu"
    return {
        "machine": dict(machine),
        "device": "cpu" if on_cpu else "cuda",
        "dtype": "torch.float32" if on_cpu else "torch.bfloat16",
        "clock": "the process's own processor time" if on_cpu else "wall clock",
        "missing": missing,
        "cases": list(cases.values()),
    }
