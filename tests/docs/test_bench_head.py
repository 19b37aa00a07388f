"""``scripts/bench_cpu.py head``, and the page rendered from its file."""

from __future__ import annotations

import gc
import json
import runpy
from pathlib import Path

import bench_cpu
import pytest
import torch
from gpu_check_parts import heads

ROOT = Path(__file__).parents[2]


def run_bench_head(monkeypatch, tmp_path):
    output = tmp_path / "head.json"
    monkeypatch.setattr(heads, "EXACT_ROWS", 5)
    cases = ["--case", "16", "4", "50", "--case", "7", "3", "20"]
    gc.freeze()  # every measurement collects garbage first
    code = bench_cpu.main(["head", "--repeats", "2", *cases, "--output", str(output)])
    return code, json.loads(output.read_text())


def test_the_heads_benchmark(monkeypatch, tmp_path):
    code, result = run_bench_head(monkeypatch, tmp_path)
    assert code == 0
    assert [(case["rows"], case["supervised"]) for case in result["cases"]] == [
        (16, 1.0),
        (16, 0.4),
        (7, 1.0),
        (7, 0.4),
    ]
    assert result["missing"]["Liger-Kernel"] == "its kernels need a GPU"
    for case in result["cases"]:
        for name, way in case["ways"].items():
            assert way["gradient_error"] < 1e-5, name
            assert way["bytes_per_logit"] == 32 or not name.startswith("fused, l"), name
            assert len(way["seconds"]) == 2
    render = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))
    tables = render["head_on_gpus"]([{"steps": {}}, {"head": result}])
    assert "**16 rows, hidden 4, vocabulary 50, 40% of them scored**" in tables
    assert "| fused, any loss |" in tables


@pytest.mark.slow
def test_failed_way_loses_only_its_row(monkeypatch, tmp_path):
    def broken(case):
        raise torch.OutOfMemoryError("CUDA out of memory\nwith details")

    monkeypatch.setattr(heads.Case, "torch_two_steps", broken)
    code, result = run_bench_head(monkeypatch, tmp_path)
    assert code == 1
    ways = result["cases"][0]["ways"]
    assert ways["torch: linear, cross_entropy"] == {"failed": "out of memory"}
    assert ways["unfused"]["seconds"]
    render = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))
    failed = "| torch: linear, cross_entropy | failed: out of memory | | | |"
    assert failed in render["bench_head_tables"](result)
