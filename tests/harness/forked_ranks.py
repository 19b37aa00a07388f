"""Command lines on a few ranks, as torchrun starts them, but forked from a process that has imported everything.

A rank of a real ``torchrun`` spends eight seconds of CPU on imports before its first line of ours. What these tests ask
of two ranks is what the ranks do together; that torchrun itself starts, kills and restarts them is for the few tests
that say so.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.forks import fork_context

# How long the others may take to end by themselves once one has failed.
PATIENCE_S = 10.0


def launch(
    ranks: int, arguments: Sequence[str], *, stdin: str, environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    """Run ``python ARGUMENTS`` on every rank.

    Args:
        ranks: processes; one alone gets no rank variables.
        arguments: ``-m MODULE ...`` or ``FILE ...``.
        stdin: what the first rank reads; the others read nothing.
        environment: of every rank; has ``OMP_NUM_THREADS``.
        timeout_s: for all of it.

    Returns:
        The exit status of the rank that failed first, or 0; standard output and standard error of all ranks.

    Raises:
        TimeoutError: a rank did not end; all are killed.
    """
    context = fork_context()
    # Where the ranks meet; torchrun has one of its own too.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="forked_ranks_") as name:
        folder = Path(name)
        (folder / "in").write_text(stdin)
        started = []
        for rank in range(ranks):
            variables = dict(environment)
            if ranks > 1:
                variables |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
                }
                (folder / str(rank)).mkdir()
            source = folder / "in" if rank == 0 else Path(os.devnull)
            process = context.Process(target=_rank, args=(list(arguments), variables, os.getcwd(), source, folder))
            process.start()
            started.append(process)
        code = _wait(started, time.monotonic() + timeout_s)
        out, err = ((folder / stream).read_text() for stream in ("out", "err"))
    if code is None:
        raise TimeoutError(f"{' '.join(arguments)} took more than {timeout_s} s:\n{out}\n{err}")
    return code, out, err


def _wait(processes: Sequence[BaseProcess], deadline: float) -> int | None:
    """Wait for all; once one has failed the others are told to end, as torchrun does."""
    failed = None
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
                process.join()
            return failed
        for process in processes:
            if failed is None and process.exitcode:
                failed, deadline = process.exitcode, min(deadline, time.monotonic() + PATIENCE_S)
                for other in processes:
                    other.terminate()
        time.sleep(0.02)
    return failed or next((process.exitcode for process in processes if process.exitcode), 0)


def _rank(arguments: list[str], variables: dict[str, str], folder: str, stdin: Path, output: Path) -> None:
    """Become ``python ARGUMENTS``, with files as its streams."""
    gc.freeze()  # what was imported before the fork
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # Torch reads the variable when it is imported, which was before this rank had it; another number gives other bits.
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    for number, file, flags in (
        (0, stdin, os.O_RDONLY),
        (1, output / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, output / "err", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    code: object = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(code or 0))  # type: ignore[call-overload]
