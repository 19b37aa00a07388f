"""``benchmarks/inside.py``, and the page rendered from its file."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_folding_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import inside

    workloads: dict[str, Any] = {
        "answers": lambda: inside.prompt_group(16, 4, 4),
        "turns": lambda: inside.rollouts(inside.QUICKSTART, 0, 1),
    }
    monkeypatch.setattr(inside, "WORKLOADS", workloads)
    monkeypatch.setattr(inside, "UNSHARED", ((3, 5),))
    output = tmp_path / "inside.json"
    small = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "ffn_hidden_size=16"]
    rounds = ["--rounds", "1", "--unshared-rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["inside.py", *rounds, "--model", *small, "--output", str(output)])
    inside.main()
    result = json.loads(output.read_text())
    answers, turns = result["workloads"]
    assert (answers["logical_tokens"], answers["fold_ratio"]) == (80, 2.5)
    assert turns["fold_ratio"] > 2
    (alone,) = result["unshared"]
    assert alone["tokens"] == 15
    assert alone["hook_seconds"] > 0
    table = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))["inside_table"](result)
    assert "| answers | 80 | 2.50x |" in table
    assert "| 3 | 15 |" in table


def test_the_benchmark_of_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import inside

    monkeypatch.setattr(inside, "PARTED", (16, 4, 8))
    monkeypatch.setattr(inside, "PARTS", (20, 10))
    output = tmp_path / "inside_parts.json"
    small = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "ffn_hidden_size=16"]
    monkeypatch.setattr(
        sys, "argv", ["inside.py", "--parts", "--rounds", "1", "--model", *small, "--output", str(output)]
    )
    inside.main()
    result = json.loads(output.read_text())
    at_once, *in_parts = result["parts"]
    assert (at_once["tokens"], at_once["recomputed"]) == (48, 0)
    assert [row["max_tokens"] for row in in_parts] == [20, 10]
    assert all(20 < row["recomputed"] < 48 for row in in_parts)
    table = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))["inside_parts_table"](result)
    assert "| at once | 0 | 1.00x |" in table
