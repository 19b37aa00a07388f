from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.cpu.launcher import single_process


@pytest.fixture(scope="module")
def megatron_on_the_cpu() -> Iterator[None]:
    """Let a module build Megatron's models in this process; it asks for this with ``usefixtures``."""
    with cpu_emulation(force=True), single_process():
        yield
