"""Result file of a step benchmark: time and peak memory of a recipe's first batch, folded against unfolded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.mcore.engine.comparison import Comparison, Gain, Measurement


def step_result(recipe: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Return the object that ``json.dump`` writes."""
    cpu_gain = comparison.cpu_gain
    return {
        "kind": "step",
        "machine": describe_machine(),
        "recipe": dict(recipe),
        "comparison": {
            **{
                name: None if way is None else _measurement(way)
                for name, way in (
                    ("folded", comparison.folded),
                    ("packed", comparison.packed),
                    ("small", comparison.small),
                    ("stock", comparison.stock),
                )
            },
            "fastest": comparison.fastest.name,
            "stock_missing": comparison.stock_missing,
            "logical_tokens": comparison.logical_tokens,
            "fold_ratio": comparison.fold_ratio,
            "expected_speedup": comparison.expected.to_json(),
        },
        "gain": _gain(comparison.gain),
        "cpu_gain": None if cpu_gain is None else _gain(cpu_gain),
    }


def _measurement(way: Measurement) -> dict[str, Any]:
    return {
        "name": way.name,
        "tokens": way.tokens,
        "peak_bytes": way.peak_bytes,
        "seconds": way.seconds,
        "cpu_seconds": way.cpu_seconds,
        "parts": [parts._asdict() for parts in way.rounds],
        "cpu_parts": None if way.cpu_rounds is None else [parts._asdict() for parts in way.cpu_rounds],
    }


def _gain(gain: Gain) -> dict[str, Any]:
    """Return the range and the median of speed-up and share, and the bound with its parts."""
    bound, shares = gain.bound, gain.shares_of_bound
    return {
        "speedup": {"min": gain.speedups[0], "median": gain.speedup, "max": gain.speedups[-1]},
        "share_of_bound": {"min": shares[0], "median": gain.share_of_bound, "max": shares[-1]},
        "bound": {
            "ratio": bound.ratio,
            "unfolded_seconds": bound.unfolded_seconds,
            **{
                name: {"ratio": ratio, "share": share, "least_unfolded_seconds": getattr(bound.least, name)}
                for name, (ratio, share) in bound.parts.items()
            },
        },
    }
