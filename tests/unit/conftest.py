"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.commands import write_rows

from mcore_prefix_tree import Sample
from mcore_prefix_tree.data import read_samples


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Sample]]:
    """Reads rows from a file, with the options of ``read_samples``."""

    def read_rows(*rows: Any, **options: Any) -> Any:
        return read_samples(write_rows(tmp_path / "rollouts.jsonl", rows), **options)

    return read_rows
