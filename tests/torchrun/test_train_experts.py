"""Recipes whose experts are spread over ranks: ``parallel.expert_model_parallel_size``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.torchrun_jobs import RECIPE, Ended, checkpoint_content, run, write_job

EXPERTS = "{num_moe_experts: 4, moe_router_topk: 2, moe_ffn_hidden_size: 24}"
EP2 = ("parallel.expert_model_parallel_size=2",)
TP2_EP2 = (*EP2, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
LAST = 4
# The router computes in fp32.
TOLERANCE = 1e-5
OPTIONS = ("optimizer.clip_grad=0", "optimizer.lr_decay_style=constant", "optimizer.lr_warmup_steps=0")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = RECIPE.replace("vocab_size: 64}", f"vocab_size: 64, dtype: float64, transformer: {EXPERTS}}}")
    assert recipe != RECIPE
    return write_job(tmp_path_factory.mktemp("experts"), recipe)


def train(job: Path, name: str, ranks: int, *overrides: str) -> Ended:
    folder = job.parent / name
    saving = (f"checkpoint.save={folder}", f"log.metrics={folder}.jsonl")
    return run(ranks, "train", job, "--resume", *OPTIONS, *saving, *overrides)


@pytest.fixture(scope="module")
def start(job: Path) -> str:
    """Weights to start from: on a CPU, ranks that draw their own experts would all draw the same."""
    done = train(job, "start", 1, "train_iters=1")
    assert done.code == 0, done.err
    return f"checkpoint.pretrained_checkpoint={job.parent / 'start'}"


@pytest.fixture(scope="module")
def one_process(job: Path, start: str) -> Path:
    done = train(job, "alone", 1, start, f"train_iters={LAST}")
    assert done.code == 0, done.err
    return job.parent / "alone"


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{folder}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, EP2, marks=pytest.mark.ci),
        pytest.param(2, TP2_EP2, marks=pytest.mark.ci),
        pytest.param(4, TP2_EP2, marks=pytest.mark.ci),
    ],
    ids=["ep2", "tp2-ep2", "tp2-ep2-dp2"],
)
def test_training_equals_that_of_one_process(
    ranks: int, layout: tuple[str, ...], job: Path, start: str, one_process: Path
) -> None:
    """Verified first, and resumed after its second step."""
    name = f"{len(layout)} on {ranks}"
    for last in (2, LAST):
        done = train(job, name, ranks, start, *layout, f"train_iters={last}", "verify.enabled=true")
        assert done.code == 0, done.err
    folder = job.parent / name
    assert [step["iteration"] for step in steps(folder)] == list(range(1, LAST + 1))
    for step, expected in zip(steps(folder), steps(one_process), strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=TOLERANCE)
    found, wanted = checkpoint_content(folder, LAST), checkpoint_content(one_process, LAST)
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        if "exp_avg" not in key:
            assert float((found[key] - weight).abs().max()) <= 1e-4 * float(weight.abs().max()), key
    if layout == EP2:
        refused = train(job, name, 1, f"train_iters={LAST + 1}")
        assert refused.code == 2
        assert "disagree on whether ranks share experts" in refused.errors[0]


@pytest.mark.parametrize(
    ("ranks", "overrides", "says"),
    [
        (1, EP2, "does not divide the 1 ranks of a pipeline stage; start the job with torchrun --nproc-per-node 2"),
        (1, ("parallel.expert_model_parallel_size=3",), "=3 ranks cannot share 4 experts evenly"),
        (1, (*EP2, "parallel.tensor_model_parallel_size=2"), "with tensor parallelism needs sequence parallelism"),
    ],
)
def test_layouts_that_experts_do_not_fit(ranks: int, overrides: tuple[str, ...], says: str, job: Path) -> None:
    done = run(ranks, "verify", job, *overrides, code=2)
    assert says in done.errors[0]
