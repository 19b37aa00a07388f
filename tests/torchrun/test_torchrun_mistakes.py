"""Reports of two ranks on mistakes and on a verification, printed once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.torchrun_jobs import RECIPE, TP2, run, run_torchrun, write_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), RECIPE)


def test_bad_standard_input_is_reported_once(job: Path) -> None:
    done = run(2, "train", job, "data.path=-", stdin='{"tokens": [1, 2]}\n{"tokens": [1, 99]}\n', code=2)
    assert done.errors == [
        "error: <stdin>:2: field 'tokens' has 99 at index 1, outside the model's vocabulary of 64; use the model's "
        "tokenizer or a larger vocabulary"
    ]
    assert done.out == ""


@pytest.mark.ci
def test_under_torchrun_a_mistake_is_reported_once(job: Path) -> None:
    done = run_torchrun(2, "train", job, "data.path=nope.jsonl")  # after the ranks have met
    assert done.code == 1  # torchrun's own
    assert "exitcode  : 2 " in done.err
    (error,) = done.errors
    assert error.startswith("error: nope.jsonl: no such file in ")
    assert "mcore_prefix_tree/" not in done.err, "no traceback of ours"
    assert done.out == ""


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train_iters=never", "recipe.yaml: train_iters: input should be a valid integer"),  # before megatron is there
        (
            "parallel.tensor_model_parallel_size=4",
            "need a multiple of 4 ranks, but this job has 2; start it with torchrun",
        ),
    ],
)
def test_a_mistake_is_reported_once(job: Path, override: str, says: str) -> None:
    done = run(2, "train", job, override, code=2)
    assert len(done.errors) == 1
    assert says in done.errors[0]
    assert "mcore_prefix_tree/" not in done.err, "no traceback of ours"
    assert done.out == ""


def test_verify_on_two_ranks(job: Path) -> None:
    passed = run(2, "verify", job, TP2, "model.dtype=float64", "--json", code=0)
    report = json.loads(passed.out)
    assert report["passed"] is True
    assert report["gradient_error"] <= report["tolerance"] == 1e-12
    assert report["parameters"] == 2 * 15, "of both ranks"


def test_failed_verification_is_reported_once(job: Path) -> None:
    failed = run(2, "train", job, TP2, "verify.enabled=true", "verify.tolerance=1e-30", code=1)
    assert failed.out.count("verify: folded against unfolded") == 1
    assert "TOO LARGE" in failed.out
    assert failed.losses == {}
    assert len(failed.errors) == 1
    assert failed.errors[0].startswith("error: folded and unfolded runs differ by more than rounding, ")


def test_two_interleaved_stages_without_overlap_are_refused(job: Path) -> None:
    stages = [f"parallel.{kind}pipeline_model_parallel_size=2" for kind in ("", "virtual_")]
    done = run(2, "train", job, *stages, "model.num_layers=4", "model.transformer.overlap_p2p_comm=false")
    assert done.code != 0
    assert "overlap_p2p_comm=False with pipeline_model_parallel_size=2" in done.errors[0]
    assert "set overlap_p2p_comm=True" in done.errors[0]
    assert "Traceback" not in done.err
