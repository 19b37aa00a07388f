"""Objectives on two ranks: every layout trains and reports like one process, and all ranks report an error together."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from harness.commands import write_rows
from harness.torchrun_jobs import LAYOUTS, TRACKER, VOCAB, reported, run

RECIPE = f"""
model:
  {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: {VOCAB}, dtype: float64}}
batch: {{global_batch_size: 8, max_tokens: 30}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1, clip_grad: 0.0}}
train_iters: 4
attention_backend: path
compare: false
verify: {{enabled: false}}
"""
OBJECTIVES = {
    "grpo": "objective={name: grpo, options: {kl_coef: 0.05, entropy_coef: 0.01}}",
    "dpo": "objective={name: dpo, options: {beta: 0.5}}",
    "critic": "objective={name: critic, options: {gamma: 0.9, clip_eps: 0.3}}",
    "reward_model": "objective={name: reward_model, options: {center_coef: 0.01}}",
}
WATCHED = {
    "grpo": {"reward", "ratio", "clip fraction", "kl", "entropy"},
    "dpo": {"accuracy", "margin"},
    "critic": {"value", "return", "value error", "clip fraction"},
    "reward_model": {"accuracy", "margin"},
}


def write_job(folder: Path) -> Path:
    """Five groups of four samples, of which each two are a pair."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(20):
        if number % 4 == 0:
            prompt = rng.integers(1, VOCAB, size=6).tolist()
        tokens = prompt + rng.integers(1, VOCAB, size=2 + number % 5).tolist()
        scores = (-math.log(VOCAB) + 0.2 * rng.standard_normal((2, len(tokens)))).tolist()
        lines.append(
            {
                "tokens": tokens,
                "loss_mask": [0] * 6 + [1] * (len(tokens) - 6),
                "reward": float(rng.random()),
                "group": number // 4,
                "pair": number // 2,
                "chosen": number % 2 == 0,
                "old_logprobs": scores[0],
                "ref_logprobs": scores[1],
                "values": (0.3 * rng.standard_normal(len(tokens))).tolist(),
            }
        )
    data = write_rows(folder / "data.jsonl", lines)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {data}}}\n{RECIPE}")
    return recipe


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@functools.cache
def in_one_process(job: Path, name: str) -> tuple[Path, list[dict[str, float]]]:
    """Its checkpoints, one per step, and its reports."""
    folder = job.parent / name
    saving = (f"checkpoint.save={folder}", "checkpoint.save_interval=1")
    return folder, reported(run(1, "train", job, OBJECTIVES[name], *saving))


# test_objective_layouts tests an objective's results in each layout; that its head is saved and read in each,
# by a critic's.
# A job takes half a minute on two cores: each layout once.
CASES = [("grpo", "tensor and sequence"), ("critic", "pipeline"), ("dpo", "data")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_two_ranks_report_and_train_as_one_process(job: Path, tmp_path: Path, name: str, layout: str) -> None:
    """From the first step's checkpoint on: the stages of a pipeline draw separate weights."""
    folder, expected = in_one_process(job, name)
    shutil.copytree(folder / "iter_0000001", tmp_path / "iter_0000001")
    (tmp_path / TRACKER).write_text("1")
    actual = reported(
        run(2, "train", job, OBJECTIVES[name], *LAYOUTS[layout], f"checkpoint.save={tmp_path}", "--resume")
    )
    assert len(actual) == 3
    for one, other in zip(actual, expected[1:], strict=True):
        assert WATCHED[name] <= one.keys() == other.keys()
        assert one == pytest.approx(other, rel=2e-3, abs=1e-5)  # as many digits as are printed


@pytest.mark.slow
def test_a_critic_starts_from_a_language_model_in_a_pipeline(job: Path, tmp_path: Path) -> None:
    """Only the last stage has the head that the checkpoint lacks; all verify their initial weights."""
    reported(run(1, "train", job, "objective={name: sft}", "train_iters=2", f"checkpoint.save={tmp_path}"))
    starting = (f"checkpoint.pretrained_checkpoint={tmp_path}", "verify.enabled=true")
    done = run(2, "train", job, OBJECTIVES["critic"], "parallel.pipeline_model_parallel_size=2", *starting)
    assert len(reported(done)) == 4
    assert f"the weights start from {tmp_path / 'iter_0000002'}, with a new scalar head" in done.out
    assert "values of a sample" in done.out


def test_all_ranks_refuse_a_model_that_has_diverged(job: Path) -> None:
    """Only the last stage sees the log-probabilities; the first one must not wait for ever."""
    wild = ("model.transformer.init_method_std=1e38", "model.dtype=float32")
    done = run(2, "train", job, OBJECTIVES["grpo"], "parallel.pipeline_model_parallel_size=2", *wild)
    assert done.code == 2
    assert done.errors
    assert all("the model's output for this sample is NaN or infinite" in line for line in done.errors)


def test_groups_of_unequal_sizes_are_streamed_to_two_ranks(tmp_path: Path) -> None:
    """Each rank counts a part of the file, and trains on the same samples as one process with all samples in memory."""
    recipe = write_job(tmp_path)
    data = tmp_path / "data.jsonl"
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for number in (4, 5):
        lines[number] |= {"rollout": 0, "reward": lines[4]["reward"]}
    kept = [line for number, line in enumerate(lines) if number not in (3, 9, 10, 11, 17)]
    write_rows(data, kept)
    overrides = (
        "objective={name: grpo, options: {alone: zero, normalise: rollout, kl_coef: 0.05}}",
        "batch.global_batch_size=null",
        "batch.groups_per_step=2",
    )
    expected = reported(run(1, "train", recipe, *overrides))
    actual = reported(run(2, "train", recipe, *overrides, "data.streaming=true", "data.num_workers=1"))
    assert len(actual) == len(expected) == 4
    for one, other in zip(actual, expected, strict=True):
        assert {"reward", "ratio"} <= one.keys() == other.keys()
        assert one == pytest.approx(other, rel=2e-3, abs=1e-5)  # as many digits as are printed
