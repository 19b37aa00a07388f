"""A disk that takes no more of a checkpoint: one sentence, every rank exits, and the previous checkpoint resumes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from harness.torchrun_jobs import (
    TP2,
    TRACKER,
    VOCAB,
    Ended,
    assert_same_bits,
    checkpoint_content,
    command,
    environment,
    run,
    write_job,
)

STEPS = 4
RECIPE = f"""
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: {VOCAB}}}
batch: {{global_batch_size: 4, max_tokens: 40}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1}}
train_iters: {STEPS}
checkpoint: {{save_interval: 2}}
compare: false
verify: {{enabled: false}}
"""

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
    return write_job(tmp_path_factory.mktemp("job"), RECIPE)


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> Path:
    """The folder in which two ranks saved after 2 and 4 steps."""
    folder = job.parent / "undisturbed"
    done = run(2, "train", job, TP2, f"checkpoint.save={folder}")
    assert done.code == 0, done.err
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
    arguments = ("train", job, TP2, f"checkpoint.save={saved}", "--resume")
    done = run(2, rank, limit, *arguments, program=(str(program),), timeout_s=120)
    assert done.code == 2
    assert_told_once(done, saved, steps=[3, 4])
    assert (saved / TRACKER).read_text() == "2"
    assert contents(saved / "iter_0000002") == contents(undisturbed / "iter_0000002")
    done = run(2, *arguments)
    assert done.code == 0, done.err
    assert_same_bits(checkpoint_content(saved, STEPS), checkpoint_content(undisturbed, STEPS))


# ``OPTIONS FOLDER COMMAND...``: a separate file system on the folder, which is copied away when the command is done.
MOUNTED = """
mount -t tmpfs -o "$1" tmpfs "$2" || exit 99
folder=$2
shift 2
"$@"
status=$?
cp -R "$folder" "$folder.after"
exit $status
"""


def mounted(options: str, folder: Path, *arguments: object) -> Ended:
    """The command line on two ranks, with a separate disk for checkpoints."""
    folder.mkdir()
    setting = f"checkpoint.save={folder}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", options, folder, *command(2, *arguments, setting)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    if done.returncode == 99 or done.stderr.startswith("unshare: "):
        pytest.skip("mounting a file system takes root")
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.ci
def test_a_disk_that_holds_one_checkpoint_and_not_two(job: Path, undisturbed: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    size = sum(path.stat().st_size for path in (undisturbed / "iter_0000002").iterdir())
    done = mounted(f"size={3 * size // 2}", saved, "train", job, TP2)
    assert done.code == 1, "torchrun's own"
    assert "exitcode  : 2 " in done.err
    assert_told_once(done, saved, steps=[1, 2, 3, 4])
    # A full disk in torch's words, or in the system's.
    assert "unexpected pos" in done.err or "No space left on device" in done.err
    assert "; 0 MiB are free" in done.err
    after = saved.with_name("saved.after")
    assert (after / TRACKER).read_text() == "2"
    assert_same_bits(checkpoint_content(after, 2), checkpoint_content(undisturbed, 2))


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_to_is_known_before_the_first_step(job: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = mounted("ro", saved, "train", job, TP2)
    assert (done.code, done.out) == (1, "")
    assert done.errors == [f"error: checkpoint.save={saved}: it cannot be written to; name a folder to write to"]
