"""The server that the tests' processes are forked from: it has imported torch, megatron and this package once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = ["mcore_prefix_tree.cpu.emulation", "mcore_prefix_tree.mcore.loop.jobs", "mcore_prefix_tree.cli.main"]


def fork_context() -> ForkServerContext:
    """Return the context whose processes are forked from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
