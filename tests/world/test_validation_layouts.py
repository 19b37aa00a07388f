"""Samples that are held out, evaluated by two ranks: the same loss as by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.torchrun_jobs import RECIPE, VOCAB, run, write_job

MODEL = ("model.dtype=float64", "optimizer.clip_grad=0", "model.num_layers=4")
DPO = ("objective.name=dpo", "train_iters=3", "data.order=file")


def pairs(seed: int, count: int) -> str:
    """Lines of pairs that share a prompt."""
    rng = np.random.default_rng(seed)
    lines = []
    for pair in range(count):
        prompt = rng.integers(1, VOCAB, size=6).tolist()
        for chosen in (True, False):
            tokens = prompt + rng.integers(1, VOCAB, size=int(rng.integers(2, 8))).tolist()
            reference = (-4.0 + 0.1 * rng.standard_normal(len(tokens))).tolist()
            lines.append({"tokens": tokens, "ref_logprobs": reference, "pair": pair, "chosen": chosen})
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    job = write_job(folder, RECIPE)
    (folder / "pairs.jsonl").write_text(pairs(0, 4))
    # Of parts of two pairs the last has one, and one of two data-parallel ranks no sample.
    (folder / "held_out.jsonl").write_text(pairs(1, 5))
    # Stages draw separate weights: all layouts start from those of one process.
    done = run(1, "train", job, *MODEL, "train_iters=2", f"checkpoint.save={folder / 'weights'}")
    assert done.code == 0, done.err
    return job


def evaluated(job: Path, ranks: int, name: str, *layout: str) -> list[dict[str, Any]]:
    folder, log = job.parent, job.parent / f"{name}.jsonl"
    done = run(
        ranks,
        "train",
        job,
        *MODEL,
        *DPO,
        *layout,
        f"data.path={folder / 'pairs.jsonl'}",
        f"validation.path={folder / 'held_out.jsonl'}",
        f"checkpoint.pretrained_checkpoint={folder / 'weights'}",
        "validation.eval_interval=2",
        f"log.metrics={log}",
    )
    assert done.code == 0, done.err
    found = [line for line in map(json.loads, log.read_text().splitlines()) if "validation_loss" in line]
    told = [f"validation after step {line['iteration']} | loss {line['validation_loss']:.6f} | " for line in found]
    lines = [line for line in done.out.splitlines() if line.startswith("validation")]
    assert len(lines) == len(told)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, told, strict=True))
    return found


@pytest.fixture(scope="module")
def one_process(job: Path) -> list[dict[str, Any]]:
    found = evaluated(job, 1, "alone")
    assert [line["iteration"] for line in found] == [0, 2, 3]
    assert found[0]["validation_metrics"].keys() >= {"accuracy", "margin"}
    return found


@pytest.mark.parametrize("layout", [pytest.param((), id="data parallel")])
def test_two_ranks_evaluate_like_one(
    job: Path, one_process: list[dict[str, Any]], layout: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    found = evaluated(job, 2, request.node.callspec.id.replace(" ", "_"), *layout)
    for line, expected in zip(found, one_process, strict=True):
        assert line["iteration"] == expected["iteration"]
        assert line["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-9)
        assert line["validation_metrics"] == pytest.approx(expected["validation_metrics"], rel=1e-9)
