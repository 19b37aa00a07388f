"""Distillation from a teacher's likeliest tokens in one process, against stock Megatron."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_jobs import (
    BATCH,
    FLOAT64,
    VOCAB,
    batch_of,
    built,
    command,
    logits_of,
    rows,
    stock_model,
    train,
    world_of_one,
    write_job,
)

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.mcore.train import checkpoint
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.recipe import RecipeError, load_recipe

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from objective_oracles import Alone
from test_objectives_distill import top_k_loss

K = 4
OPTIONS = {"divergence": "jsd", "jsd_beta": 0.3, "normalise": "sample"}


def taught(content: list[dict[str, Any]], k: int = K) -> list[dict[str, Any]]:
    """A teacher that is a function of the path, as a model is."""
    made = []
    for row in content:
        tokens = row["tokens"]
        teacher: dict[str, Any] = {"token_ids": [[*range(k)]], "logprobs": [[None] * k]}
        for t in range(1, len(tokens)):
            rng = np.random.default_rng(tokens[:t])
            scores = 2 * rng.standard_normal(VOCAB)
            scores -= np.log(np.exp(scores).sum())
            ids = np.argsort(-scores)[:k]
            teacher["token_ids"].append(ids.tolist())
            teacher["logprobs"].append(scores[ids].tolist())
        made.append(row | {"teacher": teacher})
    return made


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, taught(rows()))


def overrides_of(options: dict[str, Any]) -> list[str]:
    return ["objective.name=distill", f"objective.options={json.dumps(options)}"]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("fused_head", [True, False], ids=["fused", "unfused"])
def test_every_step_is_the_stock_model_s_step(job: Path, divergence: str, fused_head: bool) -> None:
    """Losses, gradient norms and weights of six steps in fp64 equal AdamW on each sample alone."""
    options = OPTIONS | {"divergence": divergence}
    recipe = load_recipe(job, [*FLOAT64, *overrides_of(options), f"fused_head={str(fused_head).lower()}"])
    notes = train(recipe)
    assert len(notes.reports) == 6
    with world_of_one(recipe) as place:
        initial = built(recipe, place).state_dict()
        model = stock_model(recipe, place)
        model.load_state_dict(initial)
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
                {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        for report in notes.reports:
            for group in optimizer.param_groups:
                group["lr"] = report.lr
            optimizer.zero_grad()
            world: Any = Alone(partial(logits_of, model), batch_of(recipe, report.iteration))
            loss = top_k_loss(make_objective("distill", options), world)
            assert report.loss == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
            assert divergence in report.metrics
            loss.backward()
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
            assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)  # Megatron's is in fp32
            optimizer.step()


def test_a_teacher_is_learnt(job: Path) -> None:
    reports = train(
        job,
        *overrides_of({}),
        "train_iters=60",
        "optimizer.lr_decay_style=constant",
        "batch.global_batch_size=16",
        "batch.max_tokens=400",
    ).reports
    assert reports[-1].metrics["forward_kl"] < reports[0].metrics["forward_kl"] / 5


def test_verification_and_comparison_go_with_it(job: Path) -> None:
    notes = train(job, *overrides_of(OPTIONS), "train_iters=2", "verify.enabled=true", "compare=true")
    assert notes.verifications[0].passed
    assert len(notes.comparisons) == 1
    assert command("verify", job, *overrides_of(OPTIONS)).exit_code == 0


def test_a_teacher_asked_about_each_sample_by_itself(tmp_path: Path) -> None:
    """It says the same of a shared prefix but for its last digits."""
    content = taught(rows())
    rng = np.random.default_rng(0)
    for row in content:
        for scores in row["teacher"]["logprobs"][1:]:
            scores[:] = [value - 1e-6 * rng.random() for value in scores]
    recipe = load_recipe(write_job(tmp_path, content), [*FLOAT64, *overrides_of(OPTIONS), "train_iters=2"])
    notes = train(recipe)
    with world_of_one(recipe) as place:
        world: Any = Alone(partial(logits_of, built(recipe, place)), batch_of(recipe, 1))
        expected = top_k_loss(make_objective("distill", OPTIONS), world)
    assert notes.losses[0] == pytest.approx(expected.item(), rel=1e-11)


@pytest.mark.parametrize("k", [4, VOCAB])
def test_a_checkpoint_is_a_teacher(tmp_path: Path, k: int) -> None:
    """What it says is what the stock model says of each sample alone; of itself it has nothing to learn."""
    job = write_job(tmp_path)
    saving = [*FLOAT64, "train_iters=2", f"checkpoint.save={tmp_path / 'teacher'}"]
    train(job, *saving)
    output = tmp_path / "taught.jsonl"
    done = command("score", job, *saving, "--teacher-top-k", str(k), "--output", str(output))
    assert done.exit_code == 0, done.output
    recipe = load_recipe(job, saving)
    scored = 0
    with world_of_one(recipe) as place:
        model = stock_model(recipe, place)
        checkpoint.load_weights(tmp_path / "teacher", 2, [model])
        for row in map(json.loads, output.read_text().splitlines()):
            assert "old_logprobs" not in row
            with torch.no_grad():
                every = torch.log_softmax(logits_of(model, row["tokens"]), dim=-1)
            for t, weight in enumerate(row["loss_mask"]):
                ids, logprobs = row["teacher"]["token_ids"][t], row["teacher"]["logprobs"][t]
                if t and weight:
                    scored += 1
                    top, wanted = every[t - 1].topk(k)
                    assert ids == wanted.tolist()
                    assert logprobs == pytest.approx(top.tolist(), rel=1e-6)
                else:
                    assert set(logprobs) == {None}
    assert scored > 20
    distilling = [*FLOAT64, *overrides_of({}), f"data.path={output}", "train_iters=2"]
    notes = train(job, *distilling, f"checkpoint.pretrained_checkpoint={tmp_path / 'teacher'}")
    assert notes.losses[0] == pytest.approx(0, abs=1e-5)  # the file has fp32
    assert train(job, *distilling).losses[0] > 1e-3


def test_what_a_teacher_cannot_be_asked(job: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = command("score", job, f"checkpoint.save={tmp_path}", *arguments, "--output", str(tmp_path / "x"))
        assert done.exit_code == 2
        return str(done.stderr)

    assert "--teacher-top-k 65: it must be from 1 to the vocabulary's 64" in refused("--teacher-top-k", "65")
    assert "--teacher-top-k 0: it must be from 1" in refused("--teacher-top-k", "0")
    assert "objective.name=critic has none" in refused("objective.name=critic", "--teacher-top-k", "2")
    assert "this model gives teacher alone" in refused("--teacher-top-k", "2", "--reference", str(tmp_path))


def test_a_second_model_is_refused(job: Path) -> None:
    with pytest.raises(RecipeError, match=r"^objective.options.teacher: full reads the logits of a second model"):
        train(job, *overrides_of({"teacher": "full"}))


def without_teacher() -> list[dict[str, Any]]:
    content = taught(rows())
    del content[2]["teacher"]
    return content


def foreign_token() -> list[dict[str, Any]]:
    content = taught([{"tokens": row["tokens"]} for row in rows()])
    content[2]["teacher"]["token_ids"][3][0] = VOCAB
    return content


def not_a_number() -> list[dict[str, Any]]:
    content = taught([{"tokens": row["tokens"]} for row in rows()])
    content[2]["teacher"]["logprobs"][3][0] = None
    return content


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (without_teacher(), r"data.jsonl:3: field 'teacher' is missing, and teacher=top_k needs it"),
        ([*taught(rows())[:2], *taught(rows()[2:], 3)], r"data.jsonl:3: field 'teacher' has rows of 3, but .* have 4"),
        (foreign_token(), r"data.jsonl:3: field 'teacher' has a token at index 3 outside the model's vocabulary of 64"),
        (not_a_number(), r"data.jsonl:3: field 'teacher' has log-probabilities that are not finite at token 3"),
    ],
    ids=["missing", "another k", "another vocabulary", "not a number"],
)
def test_a_bad_teacher_names_the_sample(tmp_path: Path, content: list[dict[str, Any]], says: str) -> None:
    job = write_job(tmp_path, content)
    with pytest.raises(SampleError, match=says):
        train(job, *overrides_of(OPTIONS), "data.shuffle=false", f"batch.global_batch_size={BATCH}")


def test_a_model_that_has_diverged(job: Path) -> None:
    with pytest.raises(SampleError, match=r"data.jsonl:\d+: the model's output for this sample is NaN or infinite"):
        train(job, *overrides_of(OPTIONS), "optimizer.lr=1e30", "optimizer.min_lr=1e30")
