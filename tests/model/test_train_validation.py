"""Reports on held-out samples, against a step on all of them and against stock Megatron."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.commands import write_rows
from harness.marks import quick
from harness.train_jobs import (
    BATCH,
    FLOAT64,
    GROUPS,
    GRPO,
    PAIRED,
    VOCAB,
    Notes,
    assert_same_bits,
    built,
    checkpoint_content,
    objective_job,
    resolved,
    rows,
    rows_with_signals,
    stock_loss,
    stock_model,
    train,
    world_of_one,
)

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import iter_sample_groups
from mcore_prefix_tree.mcore.engine.evaluation import HeldOut
from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.mcore.loop.session import EndedError
from mcore_prefix_tree.settings import Recipe, RecipeError, load_recipe

SGD = ("optimizer.lr_decay_style=constant", "optimizer.lr_warmup_steps=0")


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "held_out.jsonl", rows(seed=1))


def losses(notes: Notes) -> dict[int, float]:
    return {one.iteration: one.loss for one in notes.evaluations}


def held_out_groups(recipe: Recipe) -> list[Any]:
    return list(iter_sample_groups(recipe.validation.path))


def test_loss_equals_the_stock_models(job: Path, held_out: Path) -> None:
    """Before the first step, in fp64, of each unfolded sample; 16 samples that a step of 6 does not divide."""
    recipe = load_recipe(job, [*FLOAT64, "train_iters=2", f"validation.path={held_out}"])
    notes = train(recipe)
    samples = [sample for group in held_out_groups(recipe) for sample in group]
    with world_of_one(recipe) as place, torch.no_grad():
        initial = built(recipe, place).state_dict()
        model = stock_model(recipe, place)
        model.load_state_dict(initial)
        expected = stock_loss(model, samples).item()
    before, after = notes.evaluations
    assert (before.iteration, after.iteration) == (0, 2)
    assert before.loss == pytest.approx(expected, rel=1e-12)
    assert after.loss != pytest.approx(expected, rel=1e-3)
    assert before.samples == len(samples) > 2 * BATCH
    assert before.logical_tokens == sum(map(len, samples)) > before.physical_tokens


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sft", {}),
        ("sft", {"normalise": "group"}),
        ("grpo", GRPO),
        ("gspo", {}),
        ("dpo", {}),
        ("kto", {"beta": 0.5}),
        ("critic", {"clip_eps": None}),
        ("reward_model", {}),
    ],
    ids=["sft", "sft by group", "grpo", "gspo", "dpo", "kto", "critic", "reward_model"],
)
@pytest.mark.parametrize("fused_head", quick(True, of=[True, False]), ids=["fused", "unfused"])
def test_loss_equals_a_step_on_all_held_out_samples(
    tmp_path: Path, name: str, options: dict[str, Any], fused_head: bool
) -> None:
    """The same loss and the same metrics, though they are computed a part at a time; in fp64."""
    paired = name in (*PAIRED, "reward_model")
    made = [
        row | {"values": row["old_logprobs"]}
        for seed in (0, 1)
        for row in rows_with_signals(seed, neighbours=2 + (not paired))
    ]
    count = len(made) // 2
    job, overrides = objective_job(tmp_path, name, options)
    trained, held_out = (write_rows(tmp_path / f"{at}.jsonl", made[at * count :][:count]) for at in (0, 1))
    overrides += [*FLOAT64, *SGD, f"fused_head={str(fused_head).lower()}", "data.order=file"]
    saved = tmp_path / "saved"
    notes = train(
        job,
        *overrides,
        "train_iters=3",
        f"data.path={trained}",
        f"checkpoint.save={saved}",
        f"validation.path={held_out}",
        "validation.eval_interval=2",
    )
    assert list(losses(notes)) == [0, 2, 3]
    assert len(set(losses(notes).values())) == 3
    step = train(
        job,
        *overrides,
        "train_iters=1",
        f"data.path={held_out}",
        f"checkpoint.pretrained_checkpoint={saved}",
        f"batch.global_batch_size={count}",
        "batch.max_tokens=1000",
    ).reports[0]
    last = notes.evaluations[-1]
    assert last.loss == pytest.approx(step.loss, rel=1e-12, abs=1e-15)
    assert last.metrics == pytest.approx(step.metrics, rel=1e-12, abs=1e-15)
    assert last.samples == count == step.samples


def test_divergence_from_a_teacher(tmp_path: Path, job: Path, held_out: Path) -> None:
    """From a second model, which also scores the held-out samples."""
    teacher = tmp_path / "teacher.yaml"
    teacher.write_text(job.read_text() + f"checkpoint: {{save: {tmp_path / 'teacher'}}}\nseed: 5\n")
    train(teacher, *FLOAT64, "train_iters=2")
    distilled = (
        *FLOAT64,
        *SGD,
        "objective.name=distill",
        "objective.options={teacher: full}",
        f"objective.teacher_recipe={teacher}",
        "data.order=file",
    )
    teacher.write_text(teacher.read_text().replace("vocab_size: 64", "vocab_size: 64\n  dtype: float64"))
    saved = f"checkpoint.save={tmp_path / 'student'}"
    notes = train(job, *distilled, "train_iters=2", saved, f"validation.path={held_out}")
    step = train(
        job,
        *distilled,
        "train_iters=1",
        f"data.path={held_out}",
        f"checkpoint.pretrained_checkpoint={tmp_path / 'student'}",
        "batch={global_batch_size: 16, max_tokens: 1000}",
    ).reports[0]
    assert notes.evaluations[-1].loss == pytest.approx(step.loss, rel=1e-12)
    assert notes.evaluations[-1].metrics == pytest.approx(step.metrics, rel=1e-12)


def test_validation_trains_nothing(tmp_path: Path, job: Path, held_out: Path) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    notes = train(job, f"checkpoint.save={with_it}", f"validation.path={held_out}", "validation.eval_interval=1")
    assert list(losses(notes)) == list(range(7))
    assert train(job, f"checkpoint.save={without}").losses == notes.losses
    assert_same_bits(checkpoint_content(with_it, 6), checkpoint_content(without, 6))


def test_resumed_run_continues_with_the_next_evaluation(tmp_path: Path, job: Path, held_out: Path) -> None:
    """The file has every evaluation once, and nothing else but the steps."""
    log = tmp_path / "metrics.jsonl"
    settings = (
        f"checkpoint.save={tmp_path / 'saved'}",
        "checkpoint.save_interval=2",
        f"validation.path={held_out}",
        "validation.eval_interval=2",
        f"log.metrics={log}",
        "optimizer.lr_decay_style=constant",
    )
    whole = losses(train(job, *settings))
    assert list(whole) == [0, 2, 4, 6]
    resumed = train(job, *settings, "train_iters=9", "validation.eval_interval=3", resume=True)
    assert list(losses(resumed)) == [9]
    written = [json.loads(line) for line in log.read_text().splitlines()]
    found = [line for line in written if "validation_loss" in line]
    assert [line["iteration"] for line in found] == [0, 2, 4, 6, 9]
    assert [line["validation_loss"] for line in found] == [*whole.values(), *losses(resumed).values()]
    assert all(
        line.keys() == {"iteration", "validation_loss", "validation_metrics", "validation_seconds"} for line in found
    )
    assert [line["iteration"] for line in written if "loss" in line] == list(range(1, 10))


def test_restarted_run_drops_evaluations_of_another_run(tmp_path: Path, job: Path, held_out: Path) -> None:
    log, board = tmp_path / "metrics.jsonl", tmp_path / "board"
    settings = ["train_iters=2", f"validation.path={held_out}", f"log.metrics={log}", f"log.tensorboard={board}"]
    for _ in range(2):
        notes = train(job, *settings)
        written = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["iteration"] for line in written if "validation_loss" in line] == [0, 2]
    assert f"log.metrics={log}: dropped 4 lines of another run" in notes.told
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = events.EventAccumulator(str(board))
    shown.Reload()
    assert [one.step for one in shown.Scalars("validation/loss")] == [0, 2]


def test_tensorboard_shows_evaluations(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job, overrides = objective_job(tmp_path, "dpo")
    held_out = write_rows(tmp_path / "held_out.jsonl", rows_with_signals(1, neighbours=2)[:6])
    board = tmp_path / "board"
    notes = train(job, *overrides, "train_iters=2", f"validation.path={held_out}", f"log.tensorboard={board}")
    shown = events.EventAccumulator(str(board))
    shown.Reload()
    for name, expected in [("loss", losses(notes))] + [
        (name, {one.iteration: one.metrics[name] for one in notes.evaluations}) for name in ("accuracy", "margin")
    ]:
        found = {one.step: one.value for one in shown.Scalars(f"validation/{name}")}
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_signal_ends_the_run_before_an_evaluation(tmp_path: Path, job: Path, held_out: Path) -> None:
    class Ended(Notes):
        def step(self, report: Any) -> None:
            super().step(report)
            if report.iteration == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    notes = Ended()
    settings = [f"checkpoint.save={tmp_path / 'saved'}", f"validation.path={held_out}", "validation.eval_interval=2"]
    with pytest.raises(EndedError):
        run_train(load_recipe(job, settings), notes)
    assert (len(notes.reports), list(losses(notes))) == (2, [0])


def test_unusable_held_out_samples_are_rejected_before_the_first_step(tmp_path: Path) -> None:
    job, overrides = objective_job(tmp_path, "dpo")
    good = rows_with_signals(1, neighbours=2)[:6]

    def refused(content: list[dict[str, Any]], *settings: str) -> str:
        held_out = write_rows(tmp_path / "held_out.jsonl", content)
        notes = Notes()
        with pytest.raises((SampleError, RecipeError)) as error:
            run_train(load_recipe(job, [*overrides, f"validation.path={held_out}", *settings]), notes)
        assert notes.reports == notes.evaluations == []
        return str(error.value).replace(str(tmp_path), "")

    lacking = {name: value for name, value in good[3].items() if name != "ref_logprobs"}
    assert refused([*good[:3], lacking, *good[4:]]).startswith("/held_out.jsonl:4: field 'ref_logprobs' is missing")
    assert refused(good[:5]).startswith("/held_out.jsonl:5: pair 2 has 1 sample; a pair is two")
    assert f"outside the model's vocabulary of {VOCAB}" in refused([{"tokens": [1, VOCAB]}])
    assert refused([]) == "/held_out.jsonl: no samples; there are no records"
    with pytest.raises(RecipeError, match=r"validation\.path: standard input is for data\.path; name a file"):
        load_recipe(job, ["validation.path=-"])
    with pytest.raises(RecipeError, match=r"validation\.eval_interval: input should be greater than 0"):
        load_recipe(job, ["validation.eval_interval=0"])


def test_skipped_held_out_samples_are_reported(tmp_path: Path, job: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", [*rows(seed=1), {"tokens": [1] * 60}])
    notes = train(
        job,
        "train_iters=1",
        "data.on_error=skip",
        "batch.over_budget=repeat",
        f"validation.path={held_out}",
        "optimizer.lr_warmup_steps=0",
    )
    assert [text for text in notes.messages if text.startswith("of validation.path: ") and ":17: " in text]
    assert notes.evaluations[0].samples == 16


def test_an_output_that_is_not_finite_names_the_sample(tmp_path: Path) -> None:
    job, overrides = objective_job(tmp_path, "dpo")
    held_out = write_rows(tmp_path / "held_out.jsonl", rows_with_signals(1, neighbours=2)[:6])
    recipe = load_recipe(job, [*overrides, "attention_backend=path", f"validation.path={held_out}"])
    with world_of_one(recipe) as place:
        model = built(recipe, place)
        of_file = [sample for group in held_out_groups(recipe) for sample in group]
        evaluated = HeldOut([of_file[at : at + 2] for at in range(0, 6, 2)], resolved(recipe, place).job, per_step=4)
        assert evaluated.evaluate([model], 0).samples == 6
        with torch.no_grad():
            model.output_layer.weight.fill_(float("nan"))
        with pytest.raises(SampleError, match=r"held_out\.jsonl:\d: the model's output for this sample is NaN"):
            evaluated.evaluate([model], 0)


def test_parts_take_complete_groups(tmp_path: Path) -> None:
    """Groups of three and of two, two groups a part; steps that count groups evaluate the same."""
    assert GROUPS == 5
    job, overrides = objective_job(tmp_path, "grpo", {"on_policy": True})
    made = [row for at, row in enumerate(rows_with_signals(1, neighbours=3)) if at not in (3, 7)]
    held_out = write_rows(tmp_path / "held_out.jsonl", made)
    common = [*overrides, *FLOAT64, *SGD, "train_iters=1", f"validation.path={held_out}"]
    (by_samples, _), (by_groups, _) = (
        train(job, *common, *size).evaluations
        for size in ((), ("batch.global_batch_size=null", "batch.groups_per_step=2"))
    )
    assert by_samples.samples == by_groups.samples == 13
    assert by_samples.loss == pytest.approx(by_groups.loss, rel=1e-12)
    assert by_samples.metrics == pytest.approx(by_groups.metrics, rel=1e-12)
