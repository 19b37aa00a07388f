"""Training in one process, against stock Megatron and against itself when it is interrupted."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness.train_jobs import (
    BATCH,
    FLOAT64,
    Notes,
    batch_of,
    built,
    check_steps,
    rows,
    stock_loss,
    stock_twin,
    train,
    world_of_one,
    write_job,
)

from mcore_prefix_tree import fold
from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.mcore.loop.session import EndRequest
from mcore_prefix_tree.mcore.loop.trainer import DivergedError
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.plan import CostModel, ModelWork, plan_step
from mcore_prefix_tree.settings import load_recipe

TRACKER = "latest_checkpointed_iteration.txt"


def test_losses_fall_on_data_that_can_be_memorised(tmp_path: Path) -> None:
    job = write_job(tmp_path, [{"tokens": row["tokens"]} for row in rows()[:BATCH]])
    losses = train(job, "train_iters=60", "optimizer.lr_decay_style=constant").losses
    assert len(losses) == 60
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), rel=0.05)  # knows nothing yet
    # The rest is the choice at the forks, which no model can know.
    assert losses[-1] < 0.5


HYBRID = ("model.hybrid_layer_pattern='*-*'", "model.num_layers=3")
NEEDS_HYBRID = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="HybridModel came with megatron-core 0.18")


@pytest.mark.parametrize("model", [(), pytest.param(HYBRID, marks=NEEDS_HYBRID)], ids=["gpt", "hybrid"])
def test_every_step_equals_the_stock_models_step(job: Path, model: tuple[str, ...]) -> None:
    """Losses and weights of six steps in fp64 equal AdamW on the stock model, one sample at a time."""
    recipe = load_recipe(job, [*FLOAT64, "optimizer.weight_decay=0.1", *model])
    notes = train(recipe)
    with world_of_one(recipe) as place:
        model = stock_twin(recipe, place)
        weights = list(model.parameters())
        check_steps(recipe, notes.reports, weights, lambda one: stock_loss(model, batch_of(recipe, one.iteration)))
    assert notes.losses[-1] < notes.losses[0]


def test_a_gradient_that_is_not_finite_ends_the_run(job: Path, tmp_path: Path) -> None:
    """Before a step of it: the checkpoint holds the previous steps."""
    wild = (
        "optimizer.lr=1e30",
        "optimizer.min_lr=1e30",
        "optimizer.lr_warmup_steps=0",
        "optimizer.lr_decay_style=constant",
    )
    notes = Notes()
    with pytest.raises(DivergedError, match=r"^step [23]: a gradient is NaN or infinite; the weights have diverged"):
        run_train(load_recipe(job, [*wild, f"checkpoint.save={tmp_path}", "checkpoint.save_interval=1"]), notes)
    assert 1 <= len(notes.reports) < 3
    assert all(math.isfinite(report.grad_norm) for report in notes.reports)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(len(notes.reports))


def test_rope_scaling_reaches_the_model(job: Path) -> None:
    scalings = ("model.rope_scaling=true", "model.rope_scaling_factor=2")
    frequencies = []
    for given in ((), scalings[:1], scalings):
        recipe = load_recipe(job, [*FLOAT64, *given])
        with world_of_one(recipe) as place:
            frequencies.append(built(recipe, place).rotary_pos_emb.inv_freq)
    # The slowest of 4 pairs turns once in 6,283 tokens, between those that scaling divides and those that it keeps.
    plain, by_8, by_2 = (row.tolist() for row in frequencies)
    assert plain[:3] == by_8[:3] == by_2[:3]
    assert by_8[3] < by_2[3] < plain[3]


def test_yarn_reaches_the_model(job: Path) -> None:
    given = ("model.position_embedding_type=yarn", "model.yarn.original_max_position_embeddings=8")
    tables = []
    for factor in (1, 4):
        recipe = load_recipe(job, [*FLOAT64, *given, f"model.yarn.rotary_scaling_factor={factor}"])
        with world_of_one(recipe) as place:
            model = built(recipe, place)
            assert model.config.yarn_beta_fast == 32
            tables.append(model.rotary_pos_emb(9))
    (plain, scale), (stretched, larger) = tables
    assert scale == 1
    assert larger == pytest.approx(0.1 * math.log(4) + 1)
    # Of 4 pairs the fastest turns once in 6 tokens; the others not in 8, and are divided by the full factor.
    torch.testing.assert_close(stretched, plain / torch.tensor([1, 4, 4, 4] * 2))


def test_step_report_fields(job: Path) -> None:
    recipe = load_recipe(job)
    notes = train(recipe)
    assert notes.spans == [(1, 6)]
    assert [report.iteration for report in notes.reports] == [1, 2, 3, 4, 5, 6]
    for report in notes.reports:
        samples = batch_of(recipe, report.iteration)
        cost_model = CostModel.from_work(ModelWork.from_model(recipe.model, fused_head=True))
        plan = plan_step(samples, max_tokens=recipe.batch.max_tokens, cost_model=cost_model)
        assert plan.num_micro_batches > 1, "or this test is too easy"
        assert report.samples == BATCH
        assert report.logical_tokens == sum(map(len, samples))
        assert report.physical_tokens == sum(
            fold([samples[i] for i in batch]).physical_tokens for batch in plan.micro_batches[0]
        )
        assert report.fold_ratio == report.logical_tokens / report.physical_tokens > 1
        assert report.grad_norm > 0
        assert 0 < report.plan_seconds < 60
        assert 0 < report.seconds < 60
    # One step of warm-up, then a cosine from 1e-2 to 1e-3 over the other steps; the first step has no rate yet.
    rates = [report.lr for report in notes.reports]
    assert rates[1] == max(rates) == 1e-2
    assert rates[0] == 0
    assert rates[1:] == sorted(set(rates[1:]), reverse=True)
    assert rates[-1] > 1e-3


def test_step_larger_than_the_data_is_reported(job: Path) -> None:
    notes = train(job, "batch.global_batch_size=20", "train_iters=2")
    assert notes.told == [
        "a step of 20 samples takes the 16 there are more than once; its fold ratio counts the repeats, which other "
        "samples would not give"
    ]
    assert train(job, "batch.global_batch_size=16", "train_iters=2").told == []


def test_new_weights_are_reported(job: Path) -> None:
    said = "the weights are new, drawn with seed=1234"
    assert train(job, "train_iters=2").messages[-1] == said
    policy = write_job(job.parent, [{**row, "reward": index % 2, "group": 0} for index, row in enumerate(rows())])
    options = ("objective.name=grpo", "objective.options.on_policy=true", "batch.global_batch_size=16")
    notes = train(policy, *options, "train_iters=2")
    assert f"{said}; objective.name=grpo improves a policy, which checkpoint.pretrained" in notes.messages[-1]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(job: Path) -> None:
    assert train(job).losses == train(job).losses
    assert train(job, "seed=5").losses[0] != train(job).losses[0]


@pytest.mark.parametrize(
    ("ending", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_run_after_its_step(job: Path, tmp_path: Path, ending: signal.Signals, code: int) -> None:
    """A process that would train for ever gets it in its third step; tests/faults has other signals and places."""
    saved = tmp_path / "saved"
    arguments = ["train_iters=100000", "optimizer.lr_decay_style=constant", f"checkpoint.save={saved}"]
    with subprocess.Popen(
        [sys.executable, "-m", "mcore_prefix_tree", "train", str(job), *arguments, "checkpoint.save_interval=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = []
        for line in process.stdout:  # arrives while it runs, not when a buffer is full
            lines.append(line.strip())
            if line.startswith("step 3 "):
                process.send_signal(ending)
        assert (process.wait(timeout=60), process.stderr.read()) == (code, "")
    *_, step, end = lines
    last = int((saved / TRACKER).read_text())
    assert step.startswith(f"step {last} |")
    assert end == (
        f"ended by {ending.name} after step {last}, which is saved in {saved}/iter_{last:07d}; continue with --resume"
    )


def test_second_ctrl_c_ends_a_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(number: int, seconds: float) -> None:
        os.kill(os.getpid(), number)
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("mcore_prefix_tree.mcore.loop.session._NEXT_CTRL_C_S", 0.01)
    with EndRequest(), pytest.raises(KeyboardInterrupt):
        twice(signal.SIGINT, 0.02)
    with EndRequest():
        twice(signal.SIGINT, 0.0)  # to the process and to its group
        twice(signal.SIGTERM, 0.02)  # timeout, and a scheduler that warned with another signal before
    monkeypatch.setenv("RANK", "0")  # a launcher sends the terminal's signal to all again
    with EndRequest():
        twice(signal.SIGINT, 0.02)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
