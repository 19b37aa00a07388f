"""The shell recipes through Megatron-LM itself: its parser and its validation; and one of them, made small,
trained, ended by a signal and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from megatron_lm import CPU, Run, require_checkout, search_path

require_checkout()

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
TRACKER = "latest_checkpointed_iteration.txt"


def environment(**variables: object) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": search_path()}
    return os.environ | fixed | {name: str(value) for name, value in variables.items()}


# Tensor-parallel and pipeline ranks.
MODELS = {"llama3_8b": (4, 2), "moonlight_16b_a3b": (1, 1), "qwen3_30b_a3b": (2, 2)}


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("llama3_8b", 1),
        ("llama3_8b", 4),
        ("moonlight_16b_a3b", 1),
        ("moonlight_16b_a3b", 2),
        ("qwen3_30b_a3b", 2),
        ("qwen3_30b_a3b", 4),
    ],
)
def test_megatron_takes_the_arguments_and_plans_the_job(name: str, nodes: int, tmp_path: Path) -> None:
    """An error of Megatron's parser or validation, or of ours, would leave no plan."""
    recipe, (tensor, stages), ranks = ROOT / "recipes" / f"{name}.sh", MODELS[name], 8 * nodes
    done = subprocess.run(
        [str(LAUNCH / "dry_run.sh"), str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment(NNODES=nodes),
    )
    assert done.returncode == 0, done.stdout
    assert "emulation" not in done.stdout
    replicas = ranks // (tensor * stages)
    # The shipped rollouts fit the fewest micro-batches that leave no stage idle.
    per_micro_batch = 256 // (replicas * stages)
    assert f"\nsizes that the data decides: --micro-batch-size {per_micro_batch} --seq-length 86" in done.stdout
    assert f" a step, in {stages} micro-batches on each of " in done.stdout
    assert " empty" not in done.stdout
    assert (
        f"a step, in {re.search(r'(?<=in )[0-9]+', done.stdout)[0]} micro-batches on each of {replicas} " in done.stdout
    )
    assert done.stdout.count("  data-parallel rank ") == replicas
    (ratio,) = re.findall(r"fold ratio (\S+)", done.stdout)
    assert float(ratio) > 2


def test_dry_run_under_torchrun_is_reported_once(tmp_path: Path) -> None:
    done = start(tmp_path, "--prefix-tree-dry-run", GPUS_PER_NODE=2)
    output, _ = done.communicate(timeout=300)
    assert done.returncode == 0, output
    assert output.count("first step: ") == 3, "its tokens, its expected speed-up and its share of the budget"
    assert output.count("first step: expected speed-up ") == 1


SMALL = (
    f"{CPU} --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 8 --vocab-size 32768 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--no-save-optim --no-load-optim --no-load-rng"
).split()


def start(folder: Path, *arguments: str, **variables: object) -> subprocess.Popen[str]:
    """The dense recipe, small enough for this machine, by its own launcher."""
    chosen = {
        "GPUS_PER_NODE": 1,
        "MAX_TOKENS": 2048,
        "MICRO_BATCH_SIZE": 8,
        "GLOBAL_BATCH_SIZE": 16,
        "TRAIN_ITERS": 200,
        "MAX_RESTARTS": 0,
        "SAVE": folder,
    }
    return subprocess.Popen(
        [str(LAUNCH / "torchrun.sh"), str(ROOT / "recipes" / "llama3_8b.sh"), *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**(chosen | variables)),
    )


def test_a_job_takes_its_sizes_from_the_data(tmp_path: Path) -> None:
    """The budget decides: a larger one makes fewer and larger micro-batches of the same steps."""
    runs = []
    for budget in (900, 16384):
        folder = tmp_path / str(budget)
        job = start(folder, "--exit-interval", "2", MICRO_BATCH_SIZE="", MAX_TOKENS=budget)
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
        ((size, longest),) = re.findall(r"^sizes that the data decides: \S+ (\d+) --seq-length (\d+)$", output, re.M)
        runs.append((int(size), int(longest), Run(output, 0).losses))
    (small, first, losses), (large, second, others) = runs
    assert small < large == 16
    assert first == second < 900
    assert [*losses] == [*others] == [1, 2]


def test_a_job_ended_by_a_signal_is_continued_by_the_same_command(tmp_path: Path) -> None:
    lines: list[str] = []
    with start(tmp_path) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if re.search(r" iteration +3/", line):
                job.send_signal(signal.SIGTERM)  # as Slurm signals torchrun when time is nearly up
    ended = Run("".join(lines), job.returncode)
    assert ended.status != 0, "for Slurm it is not done"
    saved = int((tmp_path / TRACKER).read_text())
    assert saved == max(ended.losses) >= 3

    with start(tmp_path, "--exit-interval", str(saved + 2)) as job:
        output, _ = job.communicate(timeout=300)
    again = Run(output, job.returncode)
    assert again.status == 0, output
    assert min(again.losses) == saved + 1
    assert again.iterations[saved + 1]["consumed samples"] == 16 * (saved + 1)
