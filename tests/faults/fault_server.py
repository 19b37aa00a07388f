"""Run commands, each in a fork of one process that has imported everything.

A fork has a separate state, as a process has, and starts in milliseconds: a thousand commands take a minute. Output of
the command, also from C++, goes to the files that the request names.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
_MEMORY = 6 << 30  # bytes, in addition to the imports
_LOOK_S = 0.002


def serve(connection: Connection) -> None:
    """Report that all is imported, then answer each request until the other end closes."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import pyarrow.parquet  # noqa: F401
    import rich.table  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    import mcore_prefix_tree.data.huggingface
    import mcore_prefix_tree.data.mistral
    import mcore_prefix_tree.data.tables
    import mcore_prefix_tree.mcore.loop.score_recipe  # noqa: F401
    from mcore_prefix_tree.cli.main import app

    gc.freeze()
    connection.send("ready")
    with suppress(EOFError):
        while True:
            connection.send(_answer(app, connection.recv()))


def _answer(app: Any, request: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_command(app, request)
    status = None
    while status is None and time.monotonic() - started < request["limit_s"]:
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            status = found
        else:
            time.sleep(_LOOK_S)
    seconds = time.monotonic() - started
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the command, if it hangs, and its leftover processes
    if status is None:
        os.waitpid(child, 0)
    return {"status": None if status is None else os.waitstatus_to_exitcode(status), "seconds": seconds}


def _be_the_command(app: Any, request: dict[str, Any]) -> None:
    status = 1
    try:
        os.setsid()
        os.chdir(request["folder"])
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(request[name], flags, 0o644), descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["mcore-prefix-tree", *request["arguments"]]
        app(prog_name="mcore-prefix-tree")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
