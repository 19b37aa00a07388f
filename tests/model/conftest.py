from pathlib import Path

import pytest


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The recipe of a tiny model, with rows as its data."""
    from harness.train_jobs import write_job  # imports Megatron, which not every test needs

    return write_job(tmp_path)
