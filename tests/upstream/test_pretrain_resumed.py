"""``pretrain_gpt`` that resumes recognises its samples, and starts new data from the beginning on request."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    ENTRY,
    FOLDED,
    LOSS,
    MODEL,
    TRAIN,
    VARIABLE,
    WEIGHTS_ONLY,
    Stock,
    megatron,
    require_checkout,
    trained,
    write_rollouts,
)

require_checkout()

BEFORE = 3
CONSTANT = TRAIN.replace("cosine", "constant").replace("--lr-warmup-iters 2", "--lr-warmup-iters 0")


def of(data: Path, saved: Path, *others: str) -> tuple[str, ...]:
    return CPU, MODEL, CONSTANT, FOLDED, f"--prefix-tree-data-path {data}", f"--save {saved}", *others


@pytest.fixture(scope="module")
def samples(stock: Stock) -> Path:
    return Path(stock.data.split()[1])


@pytest.fixture(scope="module")
def others(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many, but not the same."""
    lines = samples.read_text().splitlines(keepends=True)
    path = tmp_path_factory.mktemp("others") / "others.jsonl"
    path.write_text("".join(lines[1:] + lines[:1]))
    return path


@pytest.fixture(scope="module")
def interrupted(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    trained(ENTRY, *of(samples, folder, f"--exit-interval {BEFORE}"))
    return folder


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("", "was trained on as many samples as --prefix-tree-data-path gives, but not the same"),
        ("--seed 7", "was trained with seed=1234, this job has seed=7 (--seed)"),
        ("--prefix-tree-order file", "was trained with order=shuffled, this job has order=file (--prefix-tree-order)"),
    ],
    ids=["samples", "seed", "order"],
)
def test_changed_data_of_a_resumed_run_is_rejected(
    samples: Path, others: Path, interrupted: Path, tmp_path: Path, change: str, says: str
) -> None:
    run = megatron(ENTRY, *of(samples if change else others, tmp_path, f"--load {interrupted}", change))
    assert run.status != 0
    (said,) = {line for line in run.output.splitlines() if "the checkpoint in --load" in line}
    assert f"the checkpoint in --load {interrupted} {says}; the data would not continue after its 48 samples" in said
    assert run.losses == {}


def test_an_objective_that_keeps_other_groups_is_named(tmp_path: Path) -> None:
    """An objective of pairs reads a pair as one record; the samples are the same, and their order is not."""
    write_rollouts(tmp_path / "rollouts.jsonl")
    folder = tmp_path / "saved"
    trained(ENTRY, *of(tmp_path / "rollouts.jsonl", folder, "--exit-interval 1"))
    run = megatron(ENTRY, *of(tmp_path / "rollouts.jsonl", folder, f"--load {folder} --prefix-tree-objective simpo"))
    assert run.status == 2
    assert (
        "was trained on as many samples as --prefix-tree-data-path gives, but not the same, or not in the same groups: "
        "its --prefix-tree-objective was sft, and is simpo now; the data would not continue after its 16 samples"
    ) in run.output


def test_folded_order_continues_at_its_last_sample(samples: Path, tmp_path: Path) -> None:
    """Over the end of the first epoch, in steps of another composition than shuffled ones."""

    def run(folder: Path, until: int, *more: str) -> dict[int, float]:
        arguments = of(samples, folder, "--prefix-tree-order folded", f"--exit-interval {until}", *more)
        return trained(ENTRY, *arguments).losses

    straight, twice = tmp_path / "straight", tmp_path / "twice"
    undisturbed = run(straight, 15)  # 200 samples in steps of 16
    losses = run(twice, 12) | run(twice, 15, f"--load {twice}")
    assert losses == pytest.approx(undisturbed, rel=LOSS)
    changed = of(samples, twice, "--prefix-tree-order folded", f"--load {twice}", "--global-batch-size 8")
    changed += ("--override-opt-param-scheduler",)  # else Megatron's schedule rejects it
    refused = megatron(ENTRY, *changed)
    assert refused.status != 0
    assert "was trained with step=16, this job has step=8 (--global-batch-size)" in refused.output


def test_new_data_begin_with_their_first_sample(others: Path, interrupted: Path, tmp_path: Path) -> None:
    """And continue midway when the job is started once more with the same words, for example by a scheduler."""
    straight, twice = (copied(interrupted, tmp_path / name) for name in ("straight", "twice"))

    def run(folder: Path, until: int) -> dict[int, float]:
        arguments = of(others, folder, f"--load {folder}", "--prefix-tree-new-data", f"--exit-interval {until}")
        done = trained(ENTRY, *arguments, ranks=2)
        begins = f"> new data: their first sample follows the {16 * BEFORE} of the checkpoint"
        assert (begins in done.output) == (folder == straight or until == BEFORE + 2)
        return done.losses

    undisturbed = run(straight, BEFORE + 4)
    assert sorted(undisturbed) == list(range(BEFORE + 1, BEFORE + 5))
    first, rest = run(twice, BEFORE + 2), run(twice, BEFORE + 4)
    assert sorted(first | rest) == sorted(undisturbed)
    assert first | rest == pytest.approx(undisturbed, rel=LOSS)

    alone = trained(ENTRY, *of(others, tmp_path / "alone", f"--load {interrupted} {WEIGHTS_ONLY} --exit-interval 1"))
    assert undisturbed[BEFORE + 1] == pytest.approx(alone.losses[1], rel=LOSS)


def test_stock_checkpoint_does_not_record_its_samples(others: Path, base: Path, tmp_path: Path) -> None:
    """It continues at its count, as stock Megatron does; or with the first sample, on request."""
    lines = []
    for name, told in (("counted", ""), ("new", "--prefix-tree-new-data")):
        data = f"{others} --prefix-tree-order file"
        arguments = of(Path(data), tmp_path / name, f"--load {base} --exit-interval 2 --no-load-optim", told)
        lines.append(trained(ENTRY, *arguments).losses[2])
    alone = trained(
        ENTRY,
        *of(Path(f"{others} --prefix-tree-order file"), tmp_path / "alone", f"--load {base} {WEIGHTS_ONLY}"),
        "--exit-interval 1",
    )
    counted, new = lines
    assert new == pytest.approx(alone.losses[1], rel=LOSS)
    assert counted != pytest.approx(new, rel=100 * LOSS)


def test_a_job_that_is_set_back_before_its_samples_is_refused(others: Path, interrupted: Path, tmp_path: Path) -> None:
    """An argument since core_v0.18; the earlier data no longer exist."""
    if "--override-ckpt-iteration" not in (Path(os.environ[VARIABLE]) / "megatron/training/arguments.py").read_text():
        pytest.skip("this Megatron-LM has no --override-ckpt-iteration")
    saved = copied(interrupted, tmp_path / "saved")
    arguments = of(others, saved, f"--load {saved}", "--prefix-tree-new-data")
    trained(ENTRY, *arguments, f"--exit-interval {BEFORE + 1}")
    run = megatron(ENTRY, *arguments, "--override-ckpt-iteration 1")
    assert run.status != 0
    assert (
        "the job continues after 16 samples, but its data began after 48; remove --override-ckpt-iteration"
        in run.output
    )
