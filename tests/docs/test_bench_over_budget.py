"""benchmarks/over_budget.py, and the tables that docs/howto/long-samples.md has of its result."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_ways_train_the_same_steps() -> None:
    result = json.loads((ROOT / "benchmarks/results/over_budget.json").read_text())
    for name in ("shipped", "forks", "prompted", "long"):
        rows = [row for row in result[name] if "refused" not in row]
        for budget in {row["budget"] for row in rows}:
            (losses,) = {tuple(round(loss, 4) for loss in row["losses"]) for row in rows if row["budget"] == budget}
            assert name == "long" or losses[-1] < losses[0]  # which is one step
        carried = [row for row in rows if row["way"] == "carry"]
        assert len(carried) == 3
        for row in rows:
            if row["way"] == "repeat":
                (other,) = (one for one in carried if one["budget"] == row["budget"])
                assert other["tokens"] + other["carried"] / 3 <= row["tokens"]
                assert name != "long" or other["seconds"] < row["seconds"]
    held, estimate = ([row[name] for row in result["memory"]] for name in ("held", "estimate"))
    assert held == sorted(held)
    assert all(one <= most for one, most in zip(held, estimate, strict=True))
