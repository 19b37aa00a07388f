"""Command lines on a few ranks, as torchrun starts them, but forked from a process that has imported everything.

A rank of a real ``torchrun`` spends eight seconds of CPU on imports before its first line of ours, and its launcher
some more. These tests cover the joint work of ranks; that torchrun itself starts, kills and restarts
them is for a few other tests.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.forks import PRELOADED
from harness.rank_server import Job


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    stdin: str = "",
    imports: Sequence[str] = PRELOADED,
    path: Sequence[str] = (),
    alone_is_rank: bool = False,
    one_stream: bool = False,
) -> tuple[int, str, str]:
    """Run ``python ARGUMENTS`` on every rank; return the status of the rank that failed first, and all ranks' output.

    ``environment`` has ``OMP_NUM_THREADS``; only the first rank reads ``stdin``; ranks find ``imports`` imported and
    search ``path`` first. With ``alone_is_rank`` a single process gets a rank's variables, as under torchrun.
    Raises TimeoutError if a rank did not end; all are killed.
    """
    # The ranks' rendezvous; torchrun has a separate one too.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="forked_ranks_") as name:
        folder = Path(name)
        (folder / "in").write_text(stdin)
        variables = [dict(environment) for _ in range(ranks)]
        for rank, own in enumerate(variables if ranks > 1 or alone_is_rank else ()):
            (folder / str(rank)).mkdir()
            own |= {
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
        out, err = folder / "out", folder / ("out" if one_stream else "err")
        job = Job(
            arguments=list(arguments),
            variables=variables,
            folder=os.getcwd(),
            stdin=str(folder / "in"),
            out=str(out),
            err=str(err),
            timeout_s=timeout_s,
        )
        code = _Server.of(tuple(imports), tuple(path)).run(job)
        printed, complained = (file.read_text() if file.exists() else "" for file in (out, err))
    if code is None:
        raise TimeoutError(f"{' '.join(arguments)} took more than {timeout_s} s:\n{printed}\n{complained}")
    return code, printed, "" if one_stream else complained


class _Server:
    """The process that ranks are forked from; it ends with this one."""

    def __init__(self, imports: tuple[str, ...], path: tuple[str, ...]) -> None:
        found = [*path, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.rank_server", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found)), "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self._end)

    @classmethod
    @functools.cache
    def of(cls, imports: tuple[str, ...], path: tuple[str, ...]) -> _Server:
        """Return the one with these imports."""
        return cls(imports, path)

    def run(self, job: Job) -> int | None:
        """Return the exit status of a job; None if it took too long."""
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.write(job.line())
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server of {' '.join(job.arguments)} ended with {self._process.wait()}"
        status: int | None = json.loads(answer)
        return status

    def _end(self) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.close()
        self._process.wait()
