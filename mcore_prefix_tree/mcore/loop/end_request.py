"""Early ends of a run: a signal is noted, the step is finished, a checkpoint saved, and all ranks leave together."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.utils.os_signals import handled_signals

_TWICE_S = 1.0


class EndedError(Exception):
    """A signal, whose number is ``signal``, ended the run between two steps; this has been reported already."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class EndRequest:
    """Notes Ctrl-C and the signals by which launchers and schedulers end a job, in a ``with`` block.

    Without a launcher, a second Ctrl-C a second later or more ends the process at once. No other repeated signal does:
    ``timeout`` sends each twice, schedulers warn before they end a job, and launchers repeat signals that all of their
    processes already have. Outside the main thread, which alone may handle signals, no signal is noted.
    """

    def __init__(self) -> None:
        self._noted = 0
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in handled_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, device: torch.device) -> int:
        """Return the signal that any rank has noted, 0 if none has; all ranks together, with the same result."""
        noted = torch.full((), self._noted, dtype=torch.int, device=device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        return int(noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted, self._noted_at = number, time.monotonic()
        elif number == signal.SIGINT and "RANK" not in os.environ and time.monotonic() - self._noted_at > _TWICE_S:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
