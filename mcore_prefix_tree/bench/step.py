"""Time and peak memory of a recipe's first batch, folded against unfolded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.mcore.engine.compare import Comparison
from mcore_prefix_tree.mcore.trainer.jobs import run_compare
from mcore_prefix_tree.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step benchmark, as its JSON file holds it."""

    machine: dict[str, object]
    recipe: Recipe
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """For ``json.dump``."""
        comparison = self.comparison
        speedups = comparison.speedups
        return {
            "kind": "step",
            "machine": self.machine,
            "recipe": asdict(self.recipe),
            "comparison": asdict(comparison)
            | {"fold_ratio": comparison.fold_ratio, "bound": comparison.bound.to_json()},
            "speedup": {"min": speedups[0], "median": comparison.speedup, "max": speedups[-1]},
            "share_of_bound": comparison.share_of_bound,
        }


def bench_step(recipe: Recipe, *, repeats: int) -> tuple[StepResult, bool]:
    """Measure, and say whether this is the main rank.

    Args:
        recipe: a job's; its first batch is run.
        repeats: counted rounds, after one that warms up.
    """
    comparison, is_main = run_compare(recipe, repeats=repeats)
    return StepResult(machine=describe_machine(), recipe=recipe, comparison=comparison), is_main
