"""From a result of the attention benchmark to rows of the table that ``attention_backend=auto`` reads."""

from __future__ import annotations

import statistics
from typing import Any

from mcore_prefix_tree.attention import BACKENDS


def costs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each forest: where it was measured, its shape, and the seconds of each back-end.

    A back-end that was measured in several ways (through several kernels, in either mode) counts with its fastest.
    """
    settings, machine = result["settings"], result["machine"]
    on_cpu = settings["device"] == "cpu"
    rows = []
    for workload in result["workloads"]:
        seconds: dict[str, float] = {}
        for row in workload["rows"]:
            name = row["method"].split(",")[0]
            if row["layout"] != "tree" or name not in BACKENDS or name == "reference":
                continue
            both = [sum(each) for each in zip(row["forward_seconds"], row["backward_seconds"], strict=True)]
            seconds[name] = min(seconds.get(name, float("inf")), round(statistics.median(both), 6))
        rows.append(
            {
                "device": "cpu" if on_cpu else machine["device"],
                "machine": machine["cpu"] if on_cpu else machine["device"],
                "dtype": settings["dtype"],
                "head_dim": settings["head_dim"],
                "name": workload["name"],
                "shape": workload["shape"],
                "seconds": dict(sorted(seconds.items())),
            }
        )
    return rows
