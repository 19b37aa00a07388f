"""Result file of a step benchmark: time and peak memory of a recipe's first batch, folded against unfolded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.mcore.engine.compare import Comparison


def step_result(recipe: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Return what ``json.dump`` writes."""
    speedups = comparison.speedups
    derived = {"fold_ratio": comparison.fold_ratio, "bound": comparison.bound.to_json()}
    return {
        "kind": "step",
        "machine": describe_machine(),
        "recipe": dict(recipe),
        "comparison": asdict(comparison) | derived,
        "speedup": {"min": speedups[0], "median": comparison.speedup, "max": speedups[-1]},
        "share_of_bound": comparison.share_of_bound,
    }
