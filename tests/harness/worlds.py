"""Gloo worlds: megatron-core's parallel state in a few processes that live as long as the tests.

::

    losses = world(4).run(train, data, layout=Layout(tp=2, pp=2))

calls ``train(data)`` in four processes, in which torch.distributed and ``megatron.core.parallel_state`` are up, and
returns each one's result. The processes are forked from one server that has imported torch and megatron once, so a
world costs about a second to start and a call some tenths of one. As with every use of multiprocessing, a script that
does this keeps its own code under ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
import torch.distributed.distributed_c10d as c10d

from harness.forks import fork_context
from harness.groups import LEFT_BEHIND, forget_losses, release_groups, threads
from mcore_prefix_tree.cpu.emulation import SEED, enable

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel layout of a world of processes. The rest after tensor and pipeline parallelism is data parallel.

    ``ep`` (expert parallelism) is taken out of the data-parallel ranks, as in Megatron.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=True needs tp > 1: there is nothing to cut the sequence over")
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1")

    def dp(self, world_size: int) -> int:
        """Return the data-parallel degree that a world of this size leaves.

        Raises:
            ValueError: the world size is not a multiple of ``tp * pp``, or ``ep`` does not divide the rest.
        """
        degree, rest = divmod(world_size, self.tp * self.pp)
        if degree == 0 or rest or degree % self.ep:
            raise ValueError(f"a world of {world_size} cannot hold {self}")
        return degree


@contextmanager
def parallel_state(layout: Layout) -> Iterator[None]:
    """Initialise ``megatron.core.parallel_state`` for a layout on the current default process group, and destroy it.

    Args:
        layout: degrees; the data-parallel one follows from the world size.
    """
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout.dp(torch.distributed.get_world_size())
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.ep > 1 else None,
    )
    try:
        torch.manual_seed(SEED)
        model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
        yield
    finally:
        state.destroy_model_parallel()


@contextmanager
def _process_group(store: c10d.Store, rank: int, size: int, timeout_s: float) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        forget_losses()
        release_groups()


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One function to run in every process of a world."""

    payload: bytes  # pickled (function, arguments), opened only after `path` is in place
    path: list[str]  # the parent's sys.path: pytest adds the folder of each test file to it
    layout: Layout
    store_file: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class _Reply:
    """Result of one process: a pickled value, or the traceback that stopped it."""

    value: bytes = b""
    error: str | None = None
    time: float = 0.0  # of the error; the clock is the machine's
    threads: int = 0  # that the process has after it


class WorkerError(RuntimeError):
    """A function raised in a process of a world; the message holds that process's traceback."""


def _execute(call: _Call, rank: int, size: int) -> _Reply:
    sys.path[:] = call.path
    function, args = pickle.loads(call.payload)
    store = torch.distributed.FileStore(call.store_file, size)  # type: ignore[attr-defined]
    # A separate group for each call: nothing that an earlier call left undelivered can reach a later one.
    with _process_group(store, rank, size, call.timeout_s), parallel_state(call.layout):
        try:
            value = function(*args)
            # Leave together, so that no rank closes its sockets while another still reads from them.
            torch.distributed.barrier()
        except Exception:
            # Now, not after the group is gone, whose end makes the other ranks fail too.
            return _Reply(error=traceback.format_exc(), time=time.monotonic())
    return _Reply(value=pickle.dumps(value))


def _serve(connection: Connection, rank: int, size: int) -> None:
    """Answer calls until the parent hangs up, which also happens when it dies."""
    # A separate process group: Ctrl-C is for the parent to handle, and close() finds megatron's processes (its
    # checkpoint writer forks, which also is why these processes cannot be daemons).
    os.setsid()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    enable()
    gc.freeze()  # imported objects need not be scanned after each call
    while True:
        try:
            call: _Call = connection.recv()
        except EOFError:
            return
        try:
            reply = _execute(call, rank, size)
        except Exception:
            reply = _Reply(error=traceback.format_exc(), time=time.monotonic())
        connection.send(replace(reply, threads=threads()))


class World:
    """A fixed number of processes that run one function at a time together. Use :func:`world` to get one.

    Args:
        size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_world_")
        self._calls = 0

    def run(self, function: Callable[..., T], *args: object, layout: Layout, timeout_s: float = 120) -> list[T]:
        """Call ``function(*args)`` in every process, inside ``parallel_state(layout)``.

        Args:
            function: a function of a module that the processes can import; it may ask torch.distributed for its rank.
            *args: picklable arguments, the same for all.
            layout: degrees of parallelism.
            timeout_s: for the entire call; each collective gets the same.

        Returns:
            The results by rank.

        Raises:
            ValueError: the layout does not fit into the world.
            WorkerError: a rank raised; the message holds the traceback of the first one to do so.
            TimeoutError: some ranks did not answer in time; the message names them.
        """
        layout.dp(self.size)
        if not self._processes:
            self._start()
        self._calls += 1
        call = _Call(
            payload=pickle.dumps((function, args)),
            path=list(sys.path),
            layout=layout,
            store_file=os.path.join(self._folder.name, f"store_{self._calls}"),
            timeout_s=timeout_s,
        )
        for connection in self._connections:
            connection.send(call)
        try:
            replies = self._replies(time.monotonic() + timeout_s)
        except BaseException:
            # The other ranks may be waiting inside a collective for the one that failed.
            self.close(patience_s=0.2)
            raise
        if max(reply.threads for reply in replies) > LEFT_BEHIND:
            self.close()
        return [pickle.loads(reply.value) for reply in replies]

    def close(self, *, patience_s: float = 5.0) -> None:
        """End the processes and their children. The next :meth:`run` starts new ones.

        Args:
            patience_s: how long they may take to end by themselves before they are killed.
        """
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # one that was not yet as far as to lead a process group
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = fork_context()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _replies(self, deadline: float) -> list[_Reply]:
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        replies: dict[int, _Reply] = {}
        errors: dict[int, _Reply] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    replies[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    replies[rank] = _Reply(error="(the process died without a word)")
                if replies[rank].error is not None:
                    errors[rank] = replies[rank]
                    # An error in one rank makes others fail, and theirs may arrive first: hear them, but not for long.
                    deadline = min(deadline, time.monotonic() + 0.2)
        if errors:
            rank, first = min(errors.items(), key=lambda item: item[1].time)
            raise WorkerError(f"rank {rank} of a world of {self.size} raised:\n{first.error}")
        if waiting:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of a world of {self.size} did not answer in time")
        return [replies[rank] for rank in range(self.size)]


@functools.cache
def world(size: int) -> World:
    """Return the world of this size: started by its first ``run``, the same one ever after, closed at exit."""
    made = World(size)
    atexit.register(made.close)
    return made
