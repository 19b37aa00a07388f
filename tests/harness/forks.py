"""The server that the tests' processes are forked from: it has imported torch, megatron and this package once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = ["harness.preload"]


def fork_context() -> ForkServerContext:
    """Return the context whose processes are forked from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
