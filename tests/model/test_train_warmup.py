"""The warm-up of the learning rate: a fraction of the steps is Megatron-LM's, and fits any number of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.train_jobs import BATCH, train


def rates_of(job: Path, *overrides: str, resume: bool = False) -> list[float]:
    return [report.lr for report in train(job, *overrides, resume=resume).reports]


def test_fraction_of_full_steps_trains_with_the_same_bits(job: Path) -> None:
    steps = train(job, "train_iters=4", "optimizer.lr_warmup_steps=2")
    fraction = train(job, "train_iters=4", "optimizer.lr_warmup_fraction=0.5")
    assert [report.lr for report in fraction.reports] == [report.lr for report in steps.reports]
    assert fraction.losses == steps.losses
    assert steps.reports[0].lr == 0
    assert steps.reports[1].lr == 5e-3


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_fraction_may_end_between_two_steps(job: Path, steps: int) -> None:
    """As in ``get_optimizer_param_scheduler`` of Megatron-LM, which counts samples and does not round."""
    linear = (f"train_iters={steps}", "optimizer.lr_decay_style=linear", "optimizer.min_lr=0", "optimizer.lr=1")
    rates = rates_of(job, *linear, "optimizer.lr_warmup_fraction=0.3")
    total, warmup = steps * BATCH, 0.3 * (steps * BATCH)
    done = [step * BATCH for step in range(steps)]
    expected = [at / warmup if at <= warmup else 1 - (at - warmup) / (total - warmup) for at in done]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert steps < 5 or 0 < rates[1] < 1


def test_a_resumed_warm_up_continues_and_follows_the_recipe(job: Path, tmp_path: Path) -> None:
    saving = ("optimizer.lr_warmup_fraction=0.6", f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=1")
    straight = train(job, "train_iters=5", "optimizer.lr_warmup_fraction=0.6")
    train(job, "train_iters=5", *saving, stop_after=2)
    resumed = train(job, "train_iters=5", *saving, resume=True)
    assert resumed.spans[0][0] > 1
    assert resumed.losses == straight.losses[resumed.spans[0][0] - 1 :]
    # More steps stretch the warm-up as they stretch the decay.
    more = rates_of(job, "train_iters=8", *saving, resume=True)
    assert more == rates_of(job, "train_iters=8", "optimizer.lr_warmup_fraction=0.6")[5:]
