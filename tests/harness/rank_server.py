"""A process that has imported much, and forks the ranks of command lines: :mod:`harness.forked_ranks` asks it.

Started as a script, with the modules to import as its arguments. A line of standard input is a :class:`Job`; the line
of standard output that answers it is how the job ended.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

# How long the others may take to end by themselves once one has failed.
PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command line, as every rank runs it; the first rank reads the file ``stdin``, the others nothing.

    ``out`` and ``err`` are files that output is added to, perhaps the same. ``variables`` has ``OMP_NUM_THREADS``.
    """

    arguments: list[str]
    variables: list[dict[str, str]]
    folder: str
    stdin: str
    out: str
    err: str
    timeout_s: float

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def serve(modules: list[str]) -> None:
    """Import modules, then run jobs until standard input ends. The answer to a job is its exit status, or null."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(Job(**json.loads(line)))), file=answers, flush=True)


def run(job: Job) -> int | None:
    """Return the status of the rank that failed first, or 0; None if a rank did not end in time, and all are killed."""
    deadline = time.monotonic() + job.timeout_s
    running = {_forked(job, rank) for rank in range(len(job.variables))}
    failed = None
    while running:
        if time.monotonic() > deadline:
            _signal(running, signal.SIGKILL)
            for pid in running:
                os.waitpid(pid, 0)
            return failed
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            running.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and failed is None:
                # The others are terminated, as torchrun does.
                failed, deadline = code, min(deadline, time.monotonic() + PATIENCE_S)
                _signal(running, signal.SIGTERM)
        time.sleep(0.02)
    return failed or 0


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _forked(job: Job, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            code = _as_rank(job, rank)
            atexit._run_exitfuncs()  # for example multiprocessing's, which ends checkpoint writers
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        os._exit(code)
    return pid


def _as_rank(job: Job, rank: int) -> int:
    """Become ``python ARGUMENTS``, with files as its streams, and return its exit status."""
    import torch

    variables = job.variables[rank]
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(job.folder)
    # Torch reads the variable when it is imported, which was before this rank had it; another number gives other bits.
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    added = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    source = os.devnull if rank else job.stdin
    for number, file, flags in ((0, source, os.O_RDONLY), (1, job.out, added), (2, job.err, added)):
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    code: Any = 0
    try:
        if job.arguments[0] == "-m":
            sys.argv = job.arguments[1:]
            runpy.run_module(job.arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = job.arguments
            sys.path.insert(0, str(Path(job.arguments[0]).parent))
            runpy.run_path(job.arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    return int(code or 0)


if __name__ == "__main__":
    serve(sys.argv[1:])
