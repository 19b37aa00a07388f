"""Objectives other than plain supervised training, in one process, against stock Megatron and by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.commands import run_command, write_rows
from harness.marks import quick
from harness.train_jobs import (
    FLOAT64,
    GROUPS,
    GRPO,
    Notes,
    batch_of,
    built,
    check_steps,
    logits_of,
    objective_job,
    resolved,
    rows_with_signals,
    stock_twin,
    train,
    world_of_one,
    write_job,
)
from objective_oracles import Alone, kto_loss, pair_loss, policy_loss, scored_positions, sft_loss

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import iter_sample_groups
from mcore_prefix_tree.logprob import head_chunks
from mcore_prefix_tree.mcore.engine.scoring import score
from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.settings import Recipe, RecipeError, load_recipe


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("grpo", GRPO, policy_loss),
        ("dapo", {"tis_cap": 2.0}, policy_loss),
        ("dpo", {}, pair_loss),
        ("orpo", {}, pair_loss),
        ("kto", {"beta": 0.5, "undesirable_weight": 0.7}, kto_loss),
        ("grpo", GRPO | {"normalise": "group"}, policy_loss),
        ("sft", {"normalise": "group"}, sft_loss),
        ("sft", {"normalise": "sample"}, sft_loss),
    ],
    ids=["grpo", "dapo", "dpo", "orpo", "kto", "grpo by group", "sft by group", "sft"],
)
@pytest.mark.parametrize("fused_head", quick(True, of=[True, False]), ids=["fused", "unfused"])
def test_every_step_equals_the_stock_models_step(
    tmp_path: Path, name: str, options: dict[str, Any], oracle: Any, fused_head: bool
) -> None:
    """Losses, gradient norms and weights of six steps in fp64 equal AdamW on unfolded samples."""
    job, overrides = objective_job(tmp_path, name, options)
    if name == "kto":
        overrides.append("data.order=file")  # a mismatched sample in every step
    recipe = load_recipe(job, [*FLOAT64, *overrides, f"fused_head={str(fused_head).lower()}"])
    notes = train(recipe)
    with world_of_one(recipe) as place:
        model = stock_twin(recipe, place)

        def step(report: Any) -> torch.Tensor:
            samples = batch_of(recipe, report.iteration)
            return oracle(make_objective(name, options), Alone(partial(logits_of, model), samples))

        check_steps(recipe, notes.reports, list(model.parameters()), step)


def test_policy_metrics(tmp_path: Path) -> None:
    job, overrides = objective_job(tmp_path, "grpo", GRPO)
    recipe = load_recipe(job, [*FLOAT64, *overrides])
    notes = train(recipe)
    for report in notes.reports:
        samples = batch_of(recipe, report.iteration)
        assert report.metrics["reward"] == pytest.approx(np.mean([sample.signals.reward for sample in samples]))
        assert {"ratio", "clip_fraction", "kl", "kl_old", "entropy", "advantage"} <= report.metrics.keys()
    with world_of_one(recipe) as place, torch.no_grad():
        world = Alone(partial(logits_of, built(recipe, place)), batch_of(recipe, 1))
        tokens = [(i, t) for i, sample in enumerate(world.samples) for t in scored_positions(sample)]
        ratios = [
            math.exp(world.logprobs(i)[t].item() - float(world.samples[i].signals.old_logprobs[t])) for i, t in tokens
        ]
        entropies = [world.entropies(i)[t].item() for i, t in tokens]
    assert notes.reports[0].metrics["ratio"] == pytest.approx(np.mean(ratios), rel=1e-9)
    assert notes.reports[0].metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-9)


def with_scores(job: Path, recipe: Recipe, columns: Sequence[str]) -> None:
    """Put the new model's values for its data into the data."""
    with world_of_one(recipe) as place:
        samples = [line[0] for line in iter_sample_groups(recipe.data.path)]
        scores = score([built(recipe, place)], samples, resolved(recipe, place).job.folding, Logprobs(entropy=True))
    path = Path(str(recipe.data.path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, own in zip(lines, scores, strict=True):
        logprobs = [None if math.isnan(value) else value for value in own.logprobs.tolist()]
        line |= dict.fromkeys(columns, logprobs)
    write_rows(path, lines)


@pytest.mark.parametrize(
    ("dtype", "budget"), [("float32", 60), ("float64", 60), pytest.param("float32", 8, id="trees above the budget")]
)
def test_the_first_importance_ratios_are_1_to_the_bit(tmp_path: Path, dtype: str, budget: int) -> None:
    """Scored and trained by one plan, the old policy is the policy."""
    job, overrides = objective_job(tmp_path, "grpo", {"kl_coef": 0.1})
    recipe = load_recipe(
        job,
        [
            f"model.dtype={dtype}",
            "optimizer.clip_grad=0",
            *overrides,
            f"batch.global_batch_size={GROUPS * 3}",
            "data.order=file",
            "train_iters=2",
            "optimizer.lr_warmup_steps=0",
            f"batch.max_tokens={budget}",
            "attention_backend=path",
        ],
    )
    with_scores(job, recipe, ["old_logprobs", "ref_logprobs"])
    reports = train(recipe).reports
    assert (reports[0].carried_tokens > 0) == (budget == 8)
    first, second = (report.metrics for report in reports)
    if dtype == "float32":  # JSON lines are read as fp32
        assert (first["ratio"], first["clip_fraction"], first["kl_old"], first["kl"]) == (1.0, 0.0, 0.0, 0.0)
    else:
        assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert second["kl_old"] > 0
    assert second["ratio"] != 1.0


def test_command_line_shows_metrics_and_dropped_samples(tmp_path: Path) -> None:
    job, overrides = objective_job(tmp_path, "grpo")
    done = run_command("train", job, *overrides, "train_iters=2", code=0)
    assert len([line for line in done.output.splitlines() if line.startswith("step ")]) == 2
    below = done.output.partition("step 1 ")[2].partition("step 2 ")[0].splitlines()[1:]
    assert all(line.startswith("  ") and len(line) <= 80 for line in below)
    shown = {part.rpartition(" ")[0] for line in below for part in line.strip().split(" | ")}
    assert {"reward", "ratio", "clip fraction", "entropy"} <= shown
    assert "each epoch skips 3 samples: steps take complete groups" in done.output


def test_verification_and_comparison_support_every_objective(tmp_path: Path) -> None:
    for name in ("grpo", "dpo"):
        job, overrides = objective_job(tmp_path, name)
        notes = train(job, *overrides, "train_iters=2", "verify.enabled=true", "compare=true")
        assert notes.verifications[0].passed
        assert len(notes.comparisons) == 1
        assert run_command("verify", job, *overrides).exit_code == 0


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("gpro", [], "objective.name: there is no objective 'gpro'; there are cispo, critic"),
        ("grpo", ["objective.options.kl_coeff=1"], "objective.options.kl_coeff: grpo has no such option; it has adv"),
        ("grpo", ["objective.options.kl_coef=-1"], "objective.options.kl_coef: input should be greater than or equal"),
        ("grpo", ["objective.options={kl_coef: 1, kl_estimator: k1}"], "objective.options: kl_estimator=k1 has no exp"),
        ("grpo", ["batch.global_batch_size=18"], "batch.global_batch_size=18 is more than the 15 samples in the data"),
    ],
)
def test_a_wrong_recipe_is_refused_by_the_key(tmp_path: Path, name: str, overrides: list[str], says: str) -> None:
    job, _ = objective_job(tmp_path, "grpo")
    with pytest.raises(RecipeError, match=says):
        train(job, f"objective.name={name}", *overrides)


def test_unknown_keys_of_an_objective(tmp_path: Path) -> None:
    job, _ = objective_job(tmp_path, "grpo")
    with pytest.raises(RecipeError, match=r"objective\.kl_coef: there is no such key"):
        load_recipe(job, ["objective.kl_coef=1"])


def test_step_that_cuts_a_group_is_rejected(tmp_path: Path) -> None:
    job, overrides = objective_job(tmp_path, "grpo")
    with pytest.raises(SampleError, match=r"data.jsonl:1: group 'prompt 0' has 3 samples, and steps .* multiple of 3"):
        train(job, *overrides, "batch.global_batch_size=4")


def test_missing_signals_are_reported_before_the_first_step(tmp_path: Path) -> None:
    """Reported before the first step, although a later one is the first to take it."""
    content = rows_with_signals(neighbours=3)
    del content[10]["old_logprobs"]
    job = write_job(tmp_path, content)
    notes = Notes()
    with pytest.raises(SampleError, match=r"data.jsonl:11: field 'old_logprobs' is missing"):
        run_train(load_recipe(job, ["objective.name=grpo", "data.order=file"]), notes)
    assert not notes.reports


@pytest.mark.parametrize(
    ("name", "options", "field", "ends"),
    [
        (
            "grpo",
            {},
            "old_logprobs",
            "and this objective without on_policy=true needs it; `mcore-prefix-tree score` with the checkpoints that "
            "the samples were drawn from writes it, or set the option on_policy=true if a step's samples were drawn "
            "with the weights it starts from",
        ),
        (
            "grpo",
            {"kl_coef": 0.1},
            "ref_logprobs",
            "and kl_coef=0.1 needs it; `mcore-prefix-tree score --reference FOLDER` writes it",
        ),
        ("dpo", {}, "ref_logprobs", " needs it; `mcore-prefix-tree score --reference FOLDER` writes it"),
        ("critic", {}, "values", "and a critic needs it; `mcore-prefix-tree score` of a critic writes it"),
        ("grpo", {}, "reward", "needs it; `mcore-prefix-tree score` of a reward model writes one"),
        ("distill", {}, "teacher", "needs it; `mcore-prefix-tree score --teacher-top-k K` of the teacher writes it"),
        ("kto", {}, "label", "and kto needs it"),
        ("grpo", {"tis_cap": 2.0}, "rollout_logprobs", "and tis_cap=2.0 needs it"),
    ],
)
def test_missing_field_error_names_the_command_that_writes_it(
    tmp_path: Path, name: str, options: dict[str, Any], field: str, ends: str
) -> None:
    content = [
        {key: value for key, value in row.items() if key != field} for row in rows_with_signals(neighbours=2)[:12]
    ]
    with pytest.raises(SampleError) as error:
        train(write_job(tmp_path, content), f"objective.name={name}", f"objective.options={json.dumps(options)}")
    assert f"field '{field}' is missing, " in str(error.value)
    assert str(error.value).endswith(ends)


@pytest.mark.parametrize(("name", "cut"), [("grpo", ()), ("dpo", ("batch.max_tokens=8",))], ids=["", "trees in chunks"])
def test_a_model_that_has_diverged(tmp_path: Path, name: str, cut: tuple[str, ...]) -> None:
    job, overrides = objective_job(tmp_path, name)
    with pytest.raises(SampleError, match=r"data.jsonl:\d+: the model's output for this sample is NaN or infinite"):
        train(job, *overrides, *cut, "model.transformer.init_method_std=1e38")


def test_a_step_without_a_mismatched_sample_is_known_before_the_first_step(tmp_path: Path) -> None:
    """The only one is among the first six samples, which the first of two steps takes."""
    content = [row | {"mismatched": at == 1} for at, row in enumerate(rows_with_signals(neighbours=3))]
    job = write_job(tmp_path, content)
    overrides = ["objective.name=kto", "data.order=file", "train_iters=2"]
    notes = Notes()
    with pytest.raises(
        SampleError, match=r"^step 2, which \S+data\.jsonl:7 is in, has no mismatched sample, and kto with"
    ):
        run_train(load_recipe(job, overrides), notes)
    assert notes.reports == []
    train(job, *overrides, "objective.options={reference_point: zero}")
    train(job, *overrides, "train_iters=1", "optimizer.lr_warmup_steps=0")


def test_head_chunks_follow_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are those of any other; of samples that are longer than a chunk, products are formed twice."""
    job, overrides = objective_job(tmp_path, "gspo")
    formed, products = [], head_chunks.Chunks.products
    monkeypatch.setattr(head_chunks.Chunks, "products", lambda self, rows: formed.append(rows) or products(self, rows))

    def run(*settings: str) -> list[float]:
        formed.clear()
        return train(job, *overrides, *FLOAT64, *settings).losses

    usual = run()
    once = sum(rows.stop - rows.start for rows in formed)
    assert run("head_chunk_rows=100") == pytest.approx(usual, rel=1e-12)
    assert sum(rows.stop - rows.start for rows in formed) == once
    assert run("head_chunk_rows=2") == pytest.approx(usual, rel=1e-12)
    assert max(rows.stop - rows.start for rows in formed) == 2
    assert sum(rows.stop - rows.start for rows in formed) > 1.2 * once


@pytest.mark.parametrize("without", ["fused_head=false", "objective.name=critic"])
def test_chunks_of_no_head_are_refused(tmp_path: Path, without: str) -> None:
    job, _ = objective_job(tmp_path, "sft")
    message = f"head_chunk_rows requires the fused head, which {without} disables; unset it"
    with pytest.raises(RecipeError, match=f"{job}: {message}$"):
        load_recipe(job, [without, "head_chunk_rows=8"])
