"""Tables of an attention benchmark, and its rows for ``attention_backend=auto``, from the seconds in its JSON."""

from __future__ import annotations

import statistics
from typing import Any

from mcore_prefix_tree.attention import BACKENDS
from mcore_prefix_tree.plan.flops import pair_flops

LAYOUTS = ("tree", "unfolded", "dense")


def flops(pairs: int, heads: int, head_dim: int, value_dim: int) -> tuple[float, float]:
    """Return the FLOPs of forward and backward by visible pairs, for every method."""
    each = pair_flops(heads, head_dim, value_dim)
    return pairs * each.forward, pairs * each.backward


def headline(workload: dict[str, Any]) -> str:
    """Return one sentence on the shape of a workload and the largest gain of folding."""
    return (
        f"{workload['name']}: {workload['tokens']:,} tokens in {workload['nodes']:,} nodes "
        f"({workload['unfolded_tokens'] / workload['tokens']:.2f}x unfolded), {workload['pairs']:,} visible pairs "
        f"({workload['unfolded_pairs'] / workload['pairs']:.2f}x unfolded)"
    )


def columns(result: dict[str, Any]) -> list[str]:
    """Headings of :func:`lines_of`."""
    unit = "TFLOP/s" if _is_gpu(result) else "GFLOP/s"
    return [
        *("method", "layout", f"forward {unit}", f"backward {unit}", "of matrix peak", "ms", "x unfolded"),
        *("x dense rate", "x flex", "tile efficiency", "metadata ms", "peak MiB", "difference"),
    ]


def lines_of(workload: dict[str, Any], result: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each method, the fastest first within a layout: medians, and the range of ratios."""
    rows = sorted(workload["rows"], key=lambda row: (LAYOUTS.index(row["layout"]), statistics.median(_seconds(row))))
    rivals = [
        next((row for row in rows if name in (row["layout"], row["method"])), None)
        for name in ("unfolded", "dense", "flex")
    ]
    return [_cells(row, rivals, result) for row in rows]


def _cells(row: dict[str, Any], rivals: list[dict[str, Any] | None], result: dict[str, Any]) -> list[str]:
    settings, seconds = result["settings"], statistics.median(_seconds(row))
    forward, backward = flops(row["pairs"], settings["heads"], settings["head_dim"], settings["value_dim"])
    unit = 1e12 if _is_gpu(result) else 1e9
    mode = ", deterministic" if row["deterministic"] else ", any order"
    efficiency, peak = min(row["tile_efficiency"].values(), default=None), row["peak_bytes"]
    return [
        row["method"] + (mode if _is_gpu(result) else ""),
        row["layout"],
        _significant(statistics.median(forward / one for one in row["forward_seconds"]) / unit),
        _significant(statistics.median(backward / one for one in row["backward_seconds"]) / unit),
        f"{(forward + backward) / seconds / 1e12 / result['ceilings']['matrix_tflops']:.0%}",
        _significant(seconds * 1e3),
        *(_times_faster(row, rival) for rival in rivals),
        "" if efficiency is None else f"{efficiency:.3f}",
        _significant(row["metadata_seconds"] * 1e3),
        "" if peak is None else f"{peak / 2**20:,.0f}",
        f"{row['difference']:.0e}",
    ]


def _times_faster(row: dict[str, Any], rival: dict[str, Any] | None) -> str:
    """Return the ratio over the rounds, in which both ran in turn; over a dense sequence, at equal pairs."""
    if rival is None or row["layout"] != "tree":
        return ""
    work = row["pairs"] / rival["pairs"] if rival["layout"] == "dense" else 1
    ratios = [work * theirs / own for own, theirs in zip(_seconds(row), _seconds(rival), strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _seconds(row: dict[str, Any]) -> list[float]:
    return [sum(both) for both in zip(row["forward_seconds"], row["backward_seconds"], strict=True)]


def _is_gpu(result: dict[str, Any]) -> bool:
    return bool(result["settings"]["device"] == "cuda")


def _significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 10 else f"{value:.3g}"


def costs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per forest and mode for ``attention_backend=auto``: the device, the shape, and the seconds.

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
        for seconds in (modes[mode] for mode in {False, row["deterministic"]}):
            seconds[name] = min(seconds.get(name, float("inf")), round(statistics.median(_seconds(row)), 6))
    return {mode: seconds for mode, seconds in modes.items() if len(seconds) > 1}
