"""``benchmarks/recurrent.py``, and the tables rendered from its file."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="HybridModel came with megatron-core 0.18")
def test_the_benchmark_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import recurrent

    counts = fold([Sample(tokens=one) for one in recurrent.deep_tree(6, 8)]).counts()
    assert (counts["segments"], counts["segment_levels"], counts["physical_tokens"]) == (11, 6, 11 * 8)
    monkeypatch.setattr(recurrent, "MODELS", {"Mamba-2": recurrent.MODELS["Mamba-2"]})
    monkeypatch.setattr(recurrent, "LEVELS", (3,))
    monkeypatch.setattr(recurrent, "LENGTHS", (2, 4))
    output = tmp_path / "recurrent.json"
    small = ["model.hidden_size=32", "model.ffn_hidden_size=32", "model.num_attention_heads=2"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"tokens": one}) + "\n" for one in recurrent.deep_tree(2, 5)))
    small += [f"data.path={data}", "data.tokenizer=null", "data.expand_turns=false", "model.vocab_size=512"]
    small.append("batch.global_batch_size=2")
    rounds = ["--rounds", "1", "--deep-rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["recurrent.py", *rounds, "--output", str(output), "--override", *small])
    recurrent.main()
    result = json.loads(output.read_text())
    assert [row["fold_ratio"] for row in result["steps"]] == [20 / 15]
    assert [row["segment"] for row in result["trees"]] == [2, 4]
    tables = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))
    assert "| Mamba-2 | 1.33x |" in tables["recurrent_steps_table"](result)
    assert "| Mamba-2 | 3 | " in tables["recurrent_trees_table"](result)
