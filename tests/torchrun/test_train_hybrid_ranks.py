"""Recipes of hybrid models on ranks: ``model.hybrid_layer_pattern`` sets the pipeline stages."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from harness.torchrun_jobs import RECIPE, run, write_job

from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL

pytestmark = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="HybridModel came with megatron-core 0.18")

FP64 = ("model.dtype=float64", "optimizer.clip_grad=0", "train_iters=3")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("hybrid"), RECIPE)


@pytest.fixture(scope="module")
def start(job: Path) -> str:
    folder = job.parent / "start"
    losses(job, 1, "*-*-", f"checkpoint.save={folder}")
    return f"checkpoint.pretrained_checkpoint={folder}"


@functools.cache
def losses(job: Path, ranks: int, pattern: str, *overrides: str) -> list[float]:
    layers = len(pattern.replace("|", ""))
    metrics = job.parent / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    options = (f"model.hybrid_layer_pattern='{pattern}'", f"model.num_layers={layers}", f"log.metrics={metrics}")
    done = run(ranks, "train", job, *FP64, *options, *overrides)
    assert done.code == 0, done.err
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        ("*-*|-", "parallel.pipeline_model_parallel_size=2"),
        ("*-*-", "parallel={tensor_model_parallel_size: 2, sequence_parallel: true}"),
        ("*|-|*|-", "parallel={pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}"),
    ],
    ids=["pp2", "tp2-sp", "vpp2"],
)
def test_ranks_train_like_one_process(pattern: str, layout: str, job: Path, start: str) -> None:
    """From the same weights: new ones of a pipeline stage are drawn by its rank."""
    assert losses(job, 2, pattern, layout, start) == pytest.approx(losses(job, 1, "*-*-", start), rel=1e-9)
