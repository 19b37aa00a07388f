"""Signals that end a job, and how a process is ended while it starts, before there is anything to save."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mcore_prefix_tree.utils.errors import ENDED_BY_SIGNAL, is_reporting_rank

# Terminals, torchrun, Slurm and other schedulers send these to all processes of a job, workers too, to end it.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_MS = 1000
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it

_is_ending = threading.Lock()


def handled_signals() -> list[int]:
    """Return the ending signals that this process does not ignore; ``nohup`` has it ignore SIGHUP."""
    return [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def end_without_stacks() -> None:
    """Keep ending signals, for example torchrun's, from printing stacks, as ``megatron.training`` requests."""
    for number in ENDING_SIGNALS:
        faulthandler.unregister(number)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Let a signal end the process at once, with one sentence, unless a handler that is installed later takes it.

    The main thread, which may wait for other ranks in C++, blocks the signals, and a separate thread receives them.
    Processes that the main thread starts inherit the block: a signal to the process group ends no compiler and no
    worker that a step waits for. The death of torchrun, which then sends no signal, counts as its SIGTERM. Outside the
    main thread, which is the only one that may handle signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = handled_signals()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    threading.Thread(target=_receive, args=(read_end,), name="mcore-prefix-tree signals", daemon=True).start()
    handlers = {number: signal.signal(number, _end_at_once) for number in numbers}
    descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(write_end)


def _receive(read_end: int) -> None:
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    signals = select.poll()  # select takes no descriptor above 1023, which a job with many files and groups has
    signals.register(read_end, select.POLLIN)
    while True:
        if signals.poll(None if launcher is None else _LOOK_MS):
            number = os.read(read_end, 1)
            if not number:
                os.close(read_end)
                return
            if signal.getsignal(number[0]) is _end_at_once:
                _end_at_once(number[0], None)
        elif os.getppid() != launcher:
            launcher = None
            os.kill(os.getpid(), signal.SIGTERM)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    if not _is_ending.acquire(blocking=False):  # the other thread is at it
        return
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        if is_reporting_rank():
            name = signal.Signals(number).name
            os.write(2, f"ended by {name} while no step was running; no checkpoint is lost\n".encode())
    os._exit(ENDED_BY_SIGNAL + number)
