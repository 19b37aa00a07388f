"""The server that the tests' processes are forked from: it has imported torch, megatron and this package once."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

PRELOADED = ["harness.preload"]


def fork_context() -> ForkServerContext:
    """Return the context whose processes are forked from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server looks for modules where a new Python does, and goes on without those that it does not find.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context
