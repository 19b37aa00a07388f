"""How a run ends early: a signal is noted, the step is finished, a checkpoint saved, and all ranks leave together."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.data.batches import ENDING_SIGNALS


class EndedError(Exception):
    """A run that a signal ended between two steps; what there is to say is said.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class EndingSignals:
    """Notes Ctrl-C and the signals by which launchers and schedulers end a job, in a ``with`` block.

    Where no launcher started this process, the second signal does what it does to any program. Launchers repeat
    signals that reached all of their processes already, and make an end of those that take long by themselves.

    Outside of the process's main thread, which alone may handle signals, none is noted.
    """

    def __init__(self) -> None:
        self._noted = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndingSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in ENDING_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, device: torch.device) -> int:
        """The signal that any rank has noted, 0 if none has; all ranks together, which get the same answer."""
        noted = torch.full((), self._noted, dtype=torch.int, device=device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        return int(noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted and "RANK" not in os.environ:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
        self._noted = self._noted or number
