import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def without_chosen_attention() -> Iterator[None]:
    """Forget the attention that a model asked for, which Megatron-Core leaves in the environment for the next."""
    _forget_attention()
    yield
    _forget_attention()


def _forget_attention() -> None:
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def megatron_bridge() -> Any:
    """``AutoBridge``, imported when the first test needs it: that takes seconds, and most workers run no such test."""
    from bridge_models import auto_bridge

    return auto_bridge()
