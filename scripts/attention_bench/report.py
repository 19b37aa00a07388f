"""Compute rates, shares and ratios of an attention benchmark from the seconds in its JSON.

All values are derived from a result file; tables and plots do not need torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_prefix_tree.plan.flops import pair_flops


def flops(pairs: int, heads: int, head_dim: int, value_dim: int) -> tuple[float, float]:
    """Return the FLOPs of forward and backward by visible pairs, for every method."""
    each = pair_flops(heads, head_dim, value_dim)
    return pairs * each.forward, pairs * each.backward


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the statistics of at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of a table.

    Attributes:
        method, layout, deterministic: values from the result.
        forward_tflops, backward_tflops: rates by visible pairs of the layout.
        share: share of the rate of the machine's matrix product, forward and backward together.
        milliseconds: forward and backward.
        metadata_ms: metadata, once per micro-batch.
        mebibytes: peak in addition to the inputs; None if it is unknown.
        tile_efficiency: efficiency of the method's tiles at the worst block size; None if it visits none of our lists.
        against_unfolded: speed-up over the fastest method on the unfolded batch.
        against_dense: rate over that of the fastest method on one causal sequence with the same number of pairs.
        against_flex: speed-up over FlexAttention on the same forest; None if FlexAttention did not run.
        difference: difference from the first method on the same layout.
    """

    method: str
    layout: str
    deterministic: bool
    forward_tflops: Spread
    backward_tflops: Spread
    share: float
    milliseconds: float
    metadata_ms: float
    mebibytes: float | None
    tile_efficiency: float | None
    against_unfolded: Spread | None
    against_dense: Spread | None
    against_flex: Spread | None
    difference: float


def lines_of(workload: dict[str, Any], result: dict[str, Any]) -> list[Line]:
    """Return the table of one workload of a result, fastest first within each layout."""
    rows = workload["rows"]
    unfolded, dense = (_fastest([row for row in rows if row["layout"] == layout]) for layout in ("unfolded", "dense"))
    flex = _fastest([row for row in rows if row["method"] == "flex"])
    order = {"tree": 0, "unfolded": 1, "dense": 2}
    lines = [_line(row, result, unfolded=unfolded, dense=dense, flex=flex) for row in rows]
    return sorted(lines, key=lambda line: (order[line.layout], line.milliseconds))


def _line(
    row: dict[str, Any],
    result: dict[str, Any],
    *,
    unfolded: dict[str, Any] | None,
    dense: dict[str, Any] | None,
    flex: dict[str, Any] | None,
) -> Line:
    forward, backward = _flops(row, result)
    seconds = _seconds(row)
    is_tree = row["layout"] == "tree"
    dense_ratio = None
    if dense is not None and is_tree:
        per_dense = sum(_flops(dense, result))
        dense_ratio = Spread.of(
            [
                (forward + backward) / own / (per_dense / other)
                for own, other in zip(seconds, _seconds(dense), strict=True)
            ]
        )
    return Line(
        method=row["method"],
        layout=row["layout"],
        deterministic=row["deterministic"],
        forward_tflops=Spread.of([forward / one / 1e12 for one in row["forward_seconds"]]),
        backward_tflops=Spread.of([backward / one / 1e12 for one in row["backward_seconds"]]),
        share=(forward + backward) / statistics.median(seconds) / 1e12 / result["ceilings"]["matrix_tflops"],
        milliseconds=statistics.median(seconds) * 1e3,
        metadata_ms=row["metadata_seconds"] * 1e3,
        mebibytes=None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20,
        tile_efficiency=min(row["tile_efficiency"].values(), default=None),
        against_unfolded=_times_faster(row, unfolded) if is_tree else None,
        against_dense=dense_ratio,
        against_flex=_times_faster(row, flex) if is_tree else None,
        difference=row["difference"],
    )


def _times_faster(row: dict[str, Any], other: dict[str, Any] | None) -> Spread | None:
    """Return the ratio in each round, in which both ran in turn; the rounds of peers come after all others."""
    if other is None:
        return None
    return Spread.of([theirs / own for own, theirs in zip(_seconds(row), _seconds(other), strict=True)])


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return min(rows, key=lambda row: statistics.median(_seconds(row)), default=None)


def _seconds(row: dict[str, Any]) -> list[float]:
    return [sum(both) for both in zip(row["forward_seconds"], row["backward_seconds"], strict=True)]


def _flops(row: dict[str, Any], result: dict[str, Any]) -> tuple[float, float]:
    settings = result["settings"]
    return flops(row["pairs"], settings["heads"], settings["head_dim"], settings["value_dim"])


def headline(workload: dict[str, Any]) -> str:
    """Return one sentence on the shape of a workload and the largest gain of folding."""
    return (
        f"{workload['name']}: {workload['tokens']:,} tokens in {workload['nodes']:,} nodes "
        f"({workload['unfolded_tokens'] / workload['tokens']:.2f}x unfolded), {workload['pairs']:,} visible pairs "
        f"({workload['unfolded_pairs'] / workload['pairs']:.2f}x unfolded)"
    )


def columns(result: dict[str, Any]) -> list[str]:
    """Headings of :func:`cells`."""
    unit, _ = _unit(result)
    return [
        *("method", "layout", f"forward {unit}", f"backward {unit}", "of matrix peak", "ms", "x unfolded"),
        *("x dense rate", "x flex", "tile efficiency", "metadata ms", "peak MiB", "difference"),
    ]


def cells(line: Line, result: dict[str, Any]) -> list[str]:
    """A line of a result as text: medians, and the ratios with their smallest and largest round."""
    _, per_tera = _unit(result)
    mode = ", deterministic" if line.deterministic else ", any order"
    return [
        line.method + (mode if _is_gpu(result) else ""),
        line.layout,
        _significant(line.forward_tflops.median * per_tera),
        _significant(line.backward_tflops.median * per_tera),
        f"{line.share:.0%}",
        _significant(line.milliseconds),
        _ratio(line.against_unfolded),
        _ratio(line.against_dense),
        _ratio(line.against_flex),
        "" if line.tile_efficiency is None else f"{line.tile_efficiency:.3f}",
        _significant(line.metadata_ms),
        "" if line.mebibytes is None else f"{line.mebibytes:,.0f}",
        f"{line.difference:.0e}",
    ]


def _is_gpu(result: dict[str, Any]) -> bool:
    return bool(result["settings"]["device"] == "cuda")


def _unit(result: dict[str, Any]) -> tuple[str, float]:
    """Return the unit of rates, and its number per TFLOP/s."""
    return ("TFLOP/s", 1.0) if _is_gpu(result) else ("GFLOP/s", 1e3)


def _ratio(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 10 else f"{value:.3g}"
