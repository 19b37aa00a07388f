from typing import Any

import pytest


@pytest.fixture(scope="session")
def megatron_bridge() -> Any:
    """``AutoBridge``, imported when the first test needs it: that takes seconds, and most workers run no such test."""
    from bridge_models import auto_bridge

    return auto_bridge()
