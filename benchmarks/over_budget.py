#!/usr/bin/env python3
"""Compare the two ways to cut trees above the budget: ``batch.over_budget=repeat`` and ``carry``.

    OMP_NUM_THREADS=1 benchmarks/over_budget.py recipes/quickstart.yaml --budgets 1024,2048,4096

Every budget trains a few steps of the recipe each way, on one process, and reports the tokens that ran forward and
backward, those that ran forward once more, and the median time of a step but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.mcore.loop.trainer import StepReport
from mcore_prefix_tree.plan import BudgetError
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import load_recipe

WAYS = ("repeat", "carry")


class Steps:
    """Reporter that keeps the reports of steps."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def measure(recipe: str, budget: int, way: str, steps: int) -> dict[str, Any]:
    """Return the figures of a budget and a way; ``refused`` is the reason if there are none."""
    overrides = [f"batch.max_tokens={budget}", f"batch.over_budget={way}", f"train_iters={steps}"]
    overrides += ["compare=false", "verify.enabled=false", "checkpoint.save=null", "log.metrics=null"]
    kept = Steps()
    figures: dict[str, Any] = {"budget": budget, "way": way}
    try:
        run_train(load_recipe(recipe, overrides), kept)
    except (BudgetError, SampleError) as error:
        return figures | {"refused": str(error)}
    after_first = kept.reports[1:]
    return figures | {
        "tokens": statistics.median(report.physical_tokens for report in after_first),
        "carried": statistics.median(report.carried_tokens for report in after_first),
        "bytes": max(report.carried_bytes for report in after_first),
        "seconds": statistics.median(report.seconds for report in after_first),
        "losses": [report.loss for report in kept.reports],
    }


def main() -> None:
    """Measure all budgets both ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--budgets", default="1024,2048,4096", help="Values of batch.max_tokens.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, help="JSON file with all figures.")
    options = parser.parse_args()
    rows = [
        measure(options.recipe, int(budget), way, options.steps)
        for budget in options.budgets.split(",")
        for way in WAYS
    ]
    table = Table("budget", "way", "tokens a step", "forward once more", "MiB of keys and values", "seconds a step")
    for row in rows:
        cells = [f"{row.get(name, float('nan')):,.4g}" for name in ("tokens", "carried")]
        held, seconds = row.get("bytes", float("nan")) / 2**20, row.get("seconds", float("nan"))
        table.add_row(f"{row['budget']:,}", row["way"], *cells, f"{held:.3g}", f"{seconds:.3g}")
    Console(width=100).print(table)
    for row in rows:
        if "refused" in row:
            print(f"{row['budget']:,} {row['way']}: {row['refused']}")
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
