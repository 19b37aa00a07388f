"""Tests that need a CUDA GPU. scripts/gpu_check runs them; elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """All tests together would reach torch's limit of versions of one function."""
    yield
    torch._dynamo.reset()
