"""A limit on the time of work that must be linear."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Of the processor. On an idle machine each test that uses it takes a second or two; quadratic work takes minutes.
_SECONDS = 60


@contextmanager
def linear_time() -> Iterator[None]:
    """Fail if the block used more processor time than linear work does on a slow and busy machine."""
    started = time.process_time()
    yield
    took = time.process_time() - started
    assert took < _SECONDS, f"{took:.0f} s of processor time: this is not linear"
