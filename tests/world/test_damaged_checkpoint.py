"""A damaged file of one rank's share of a checkpoint ends all ranks with one sentence that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.torchrun_jobs import RECIPE, TP2, run, write_job

# Not shared out: they are not read back into a run.
INFORMATION = ("checksums.json", "recipe.yaml")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose run has saved iteration 2 on two ranks."""
    path = write_job(tmp_path_factory.mktemp("damaged"), RECIPE)
    run(2, "train", path, TP2, "train_iters=2", f"checkpoint.save={path.parent / 'runs'}", code=0)
    return path


def test_damage_in_rank_1s_share_is_reported_once(job: Path) -> None:
    runs = job.parent / "runs"
    files = sorted(path for path in (runs / "iter_0000002").iterdir() if path.name not in INFORMATION)
    damaged = next(path for path in files[1::2] if path.suffix == ".distcp")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = run(2, "train", job, TP2, "train_iters=3", f"checkpoint.save={runs}", "--resume", code=2)
    assert len(done.errors) == 1, done.err
    assert f"{damaged} is damaged" in done.errors[0] or f"{damaged} differs" in done.errors[0]
    assert "mcore_prefix_tree/" not in done.err.replace(done.errors[0], ""), "no traceback of ours"
    assert done.losses == {}
