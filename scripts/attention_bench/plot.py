"""A roofline of the attention benchmark: rate over arithmetic intensity, under the machine's two ceilings."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from attention_bench.report import flops
from mcore_prefix_tree.utils.versions import install_command

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def draw_roofline(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: a circle for each method's forward on each forest, a square for its backward.

    Intensity is FLOPs by visible pairs over the bytes that must move at least once: query, key, value and the result;
    in backward also the result's gradient and the three gradients.

    Args:
        result: result of the benchmark, as in its JSON.
        path: file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError(f"the roofline needs matplotlib: {install_command('plot')}") from None
    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    points = points_of(result)
    peak, bandwidth = result["ceilings"]["matrix_tflops"], result["ceilings"]["copy_gbytes"] / 1e3
    figure, axes = pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")
    reach = [intensity for _, _, intensity, _ in points] + [peak / bandwidth]
    left, right = min(reach) / 2, max(reach) * 2
    axes.plot([left, peak / bandwidth, right], [left * bandwidth, peak, peak], color="black", linewidth=1)
    methods = sorted({method for method, _, _, _ in points})
    for number, method in enumerate(methods):
        for marker, which in (("o", "forward"), ("s", "backward")):
            own = [(x, y) for name, part, x, y in points if (name, part) == (method, which)]
            label = method if which == "forward" else None
            axes.scatter(*zip(*own, strict=True), s=18, marker=marker, color=f"C{number % 10}", label=label, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs by visible pairs per byte (circle: forward, square: backward)")
    axes.set_ylabel("TFLOP/s by visible pairs")
    axes.set_title(f"{result['machine']['device']}, {result['settings']['dtype']}", fontsize=10)
    axes.legend(fontsize=7, loc="lower right")
    try:
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
    finally:
        pyplot.close(figure)


def points_of(result: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Yield method, ``forward`` or ``backward``, FLOPs per byte and TFLOP/s of every method on every forest."""
    settings = result["settings"]
    heads, kv_heads = settings["heads"], settings["kv_heads"]
    head_dim, value_dim = settings["head_dim"], settings["value_dim"]
    item = _ITEM_BYTES[settings["dtype"]]
    points = []
    for workload in result["workloads"]:
        for row in workload["rows"]:
            if row["layout"] != "tree":
                continue
            queries = row["tokens"] * heads * head_dim * item
            keys_values = row["tokens"] * kv_heads * (head_dim + value_dim) * item
            results = row["tokens"] * heads * value_dim * item
            moved = queries + keys_values + results
            forward, backward = flops(row["pairs"], heads, head_dim, value_dim)
            for which, work, size, seconds in (
                ("forward", forward, moved, row["forward_seconds"]),
                # In: query, key, value, the result and its gradient. Out: three gradients.
                ("backward", backward, moved + results + queries + keys_values, row["backward_seconds"]),
            ):
                points.append((row["method"], which, work / size, work / statistics.median(seconds) / 1e12))
    return points
