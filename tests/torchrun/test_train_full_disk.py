"""A disk that takes no more of a checkpoint: one sentence, every rank exits, and the previous checkpoint resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness.torchrun_jobs import (
    RECIPE,
    TP2,
    TRACKER,
    Ended,
    assert_same_bits,
    checkpoint_content,
    run,
    write_job,
)

STEPS = 4

# ``RANK LIMIT ARGUMENT...``: the command line, in which one rank can write no file larger than LIMIT bytes.
LIMITED = """
import os, resource, sys

from mcore_prefix_tree.cli.main import app

if __name__ == "__main__":
    rank, limit = sys.argv.pop(1), int(sys.argv.pop(1))
    if os.environ["RANK"] == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    app()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), RECIPE + "checkpoint: {save_interval: 2}\n")


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> Path:
    """The folder in which two ranks saved after 2 and 4 steps."""
    folder = job.parent / "undisturbed"
    run(2, "train", job, TP2, f"train_iters={STEPS}", f"checkpoint.save={folder}", code=0)
    return folder


def half_way(undisturbed: Path, folder: Path) -> Path:
    """A copy in which the first checkpoint is the last."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(undisturbed / "iter_0000002", folder / "iter_0000002")
    (folder / TRACKER).write_text("2")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_told_once(done: Ended, saved: Path, *, steps: list[int]) -> None:
    (sentence,) = done.errors
    target = saved / "iter_0000004"
    assert sentence.startswith(f"error: checkpoint.save={saved}: iteration 4 could not be written to {target} (")
    assert sentence.endswith(
        " MiB are free); the checkpoint of iteration 2 is whole; make room there and start again with --resume"
    )
    assert "mcore_prefix_tree/" not in done.err, "no traceback of ours"
    assert "dist_checkpointing" not in done.err, "nor of Megatron's"
    assert list(done.losses) == steps


@pytest.mark.parametrize(
    ("rank", "limit"),
    [
        pytest.param(0, 1000, id="the main rank's first file", marks=pytest.mark.slow),
        pytest.param(0, 100_000, id="the main rank's shard", marks=pytest.mark.slow),
        pytest.param(1, 100_000, id="another rank's shard"),
    ],
)
def test_a_rank_that_cannot_write_ends_the_job_with_a_sentence(
    job: Path, undisturbed: Path, tmp_path: Path, rank: int, limit: int
) -> None:
    saved = half_way(undisturbed, tmp_path / "saved")
    program = tmp_path / "limited.py"
    program.write_text(LIMITED)
    arguments = ("train", job, TP2, f"train_iters={STEPS}", f"checkpoint.save={saved}", "--resume")
    done = run(2, rank, limit, *arguments, program=(str(program),), timeout_s=120, code=2)
    assert_told_once(done, saved, steps=[3, 4])
    assert (saved / TRACKER).read_text() == "2"
    assert contents(saved / "iter_0000002") == contents(undisturbed / "iter_0000002")
    done = run(2, *arguments, code=0)
    assert_same_bits(checkpoint_content(saved, STEPS), checkpoint_content(undisturbed, STEPS))
