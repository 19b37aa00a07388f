"""``benchmarks/trl_backbone.py``, and the page rendered from its file. Needs TRL."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed")
ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_folding_under_trl(monkeypatch, tmp_path):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trl_backbone

    monkeypatch.setattr(trl_backbone, "WORKLOADS", {"answers": lambda: trl_backbone.prompt_group(16, 4, 4)})
    monkeypatch.setattr(trl_backbone, "UNSHARED", ((3, 5),))
    small = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(trl_backbone, "MODEL", {"num_hidden_layers": 1} | small)
    output = tmp_path / "trl.json"
    rounds = ["--rounds", "1", "--unshared-rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["trl_backbone.py", *rounds, "--output", str(output)])
    trl_backbone.main()
    result = json.loads(output.read_text())
    (answers,), (apart,) = result["workloads"], result["unshared"]
    assert (answers["logical_tokens"], answers["fold_ratio"]) == (80, 2.5)
    # TRL computes the last token of the prompt once for each answer.
    assert answers["packing"]["tokens"] == {"trl": 35, "folds": 32}
    assert apart["tokens"] == 15
    table = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))["trl_table"](result)
    assert "| answers | 80 | 2.50 |" in table
    assert "| 3 | 15 |" in table
