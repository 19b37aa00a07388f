"""``torchrun -m mcore_prefix_tree``: two real processes, killed, resumed and cut another way."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.torchrun_jobs import (
    RECIPE,
    STEPS,
    TP2,
    TRACKER,
    Ended,
    checkpoint_content,
    command,
    environment,
    rows,
    run,
    run_torchrun,
    write_job,
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), RECIPE)


def saving(folder: Path) -> tuple[str, str]:
    return f"checkpoint.save={folder}", "checkpoint.save_interval=3"


@pytest.fixture(scope="module")
def one_process(job: Path) -> tuple[Path, Ended]:
    """One process, all steps: its checkpoints and its output."""
    folder = job.parent / "alone"
    done = run(1, "train", job, *saving(folder), code=0)
    assert list(done.losses) == list(range(1, STEPS + 1))
    return folder, done


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> tuple[Path, Ended]:
    """Two tensor-parallel ranks, all steps."""
    folder = job.parent / "undisturbed"
    done = run(2, "train", job, TP2, *saving(folder), f"log.metrics={folder / 'metrics.jsonl'}", code=0)
    assert list(done.losses) == list(range(1, STEPS + 1))
    return folder, done


def test_one_of_two_ranks_writes_the_metrics(undisturbed: tuple[Path, Ended]) -> None:
    folder, done = undisturbed
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["iteration"]: f"{line['loss']:.6f}" for line in written} == done.losses
    assert len(written) == STEPS


def continue_at(folder: Path, iteration: int, target: Path) -> Path:
    """A copy of a checkpoint folder in which nothing came after an iteration."""
    target.mkdir()
    shutil.copytree(folder / f"iter_{iteration:07d}", target / f"iter_{iteration:07d}")
    (target / TRACKER).write_text(str(iteration))
    return target


@pytest.mark.parametrize(
    "layout", [pytest.param((TP2, "parallel.sequence_parallel=true"), id="tensor and sequence parallel")]
)
def test_checkpoint_of_one_process_resumes_in_two(
    job: Path, one_process: tuple[Path, Ended], tmp_path: Path, layout: Sequence[str]
) -> None:
    folder, reference = one_process
    saved = continue_at(folder, 3, tmp_path / "saved")
    done = run(2, "train", job, *layout, *saving(saved), "--resume", code=0)
    assert f"\nresumed from {saved / 'iter_0000003'}\n" in f"\n{done.out}"
    assert done.out.count("resumed from") == 1
    assert list(done.losses) == list(range(4, STEPS + 1))
    for step, loss in done.losses.items():
        assert float(loss) == pytest.approx(float(reference.losses[step]), rel=1e-6, abs=1e-6)  # six digits are printed
    # And the trained weights, as far apart as fp32 sums in another order bring them.
    actual, expected = checkpoint_content(saved, STEPS), checkpoint_content(folder, STEPS)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith("optimizer."):
            assert (actual[name] - value).norm() <= 1e-4 * value.norm(), name


def test_checkpoint_of_two_ranks_resumes_in_one_process(
    job: Path, undisturbed: tuple[Path, Ended], tmp_path: Path
) -> None:
    folder, reference = undisturbed
    done = run(1, "train", job, *saving(continue_at(folder, 9, tmp_path / "saved")), "--resume", code=0)
    assert list(done.losses) == [10, 11, 12]
    for step, loss in done.losses.items():
        assert float(loss) == pytest.approx(float(reference.losses[step]), rel=1e-6, abs=1e-6)


# The command line, where rank 1 does not see the checkpoint yet that another machine has saved.
LATE = """
import os

from mcore_prefix_tree.cli.main import app
from mcore_prefix_tree.mcore.checkpoints import checkpoint

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        checkpoint.latest_iteration = lambda folder: None
    app()
"""


def test_all_ranks_resume_from_the_main_ranks_checkpoint(
    job: Path, undisturbed: tuple[Path, Ended], tmp_path: Path
) -> None:
    folder, _ = undisturbed
    saved, program = continue_at(folder, 3, tmp_path / "saved"), tmp_path / "late.py"
    program.write_text(LATE)
    done = run(
        2,
        "train",
        job,
        TP2,
        *saving(saved),
        "train_iters=3",
        "--resume",
        program=(str(program),),
        timeout_s=120,
        code=0,
    )
    assert done.out.splitlines() == [
        f"changed since {saved / 'iter_0000003'}: train_iters {STEPS} -> 3",
        f"resumed from {saved / 'iter_0000003'}",
        "nothing to train: train_iters=3 are done",
        f"saved: {saved / 'iter_0000003'}",
    ]


def test_torchrun_starts_ranks_that_all_get_standard_input(job: Path, undisturbed: tuple[Path, Ended]) -> None:
    _, reference = undisturbed
    text = "".join(json.dumps(row) + "\n" for row in rows())
    done = run_torchrun(2, "train", job, TP2, "data.path=-", stdin=text)
    assert done.code == 0, done.err
    assert done.losses == reference.losses


@pytest.mark.ci
def test_ranks_that_mpirun_started_train_the_same(job: Path, undisturbed: tuple[Path, Ended], tmp_path: Path) -> None:
    _, reference = undisturbed
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            command(1, "train", job, TP2, *saving(tmp_path)),
            env=environment()
            | meet
            | {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
            | {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (Ended(code=0, out=out, err=err) for out, err in said)
    assert first.losses == reference.losses
    assert second.out == ""
