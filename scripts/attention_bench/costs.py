"""Rows of the table that ``attention_backend=auto`` reads, from a result of the attention benchmark."""

from __future__ import annotations

import statistics
from typing import Any

from mcore_prefix_tree.attention import BACKENDS


def costs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per forest and mode: the device, its shape, and the seconds of each back-end.

    If several kernels of a back-end were measured, the fastest counts.
    """
    settings, machine = result["settings"], result["machine"]
    on_cpu = settings["device"] == "cpu"
    return [
        {
            "device": "cpu" if on_cpu else machine["device"],
            "machine": machine["cpu"] if on_cpu else machine["device"],
            "dtype": settings["dtype"],
            "head_dim": settings["head_dim"],
            "deterministic": deterministic,
            "name": workload["name"],
            "shape": workload["shape"],
            "seconds": dict(sorted(seconds.items())),
        }
        for workload in result["workloads"]
        for deterministic, seconds in _seconds_by_mode(workload).items()
    ]


def _seconds_by_mode(workload: dict[str, Any]) -> dict[bool, dict[str, float]]:
    """Return the seconds of forward and backward together for each back-end, by whether it must be deterministic.

    A deterministic measurement counts in both modes. A mode with one back-end compares nothing, and is left out.
    """
    modes: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for row in workload["rows"]:
        name = row["method"].split(",")[0]
        if row["layout"] != "tree" or name not in BACKENDS or name == "reference":
            continue
        both = [sum(each) for each in zip(row["forward_seconds"], row["backward_seconds"], strict=True)]
        for seconds in (modes[mode] for mode in {False, row["deterministic"]}):
            seconds[name] = min(seconds.get(name, float("inf")), round(statistics.median(both), 6))
    return {mode: seconds for mode, seconds in modes.items() if len(seconds) > 1}
