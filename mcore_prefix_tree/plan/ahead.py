"""The next steps' work made in the background while the current step computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Queue
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Iterates over ``make(0), make(1), ...``, made by one thread that runs a bounded number of steps ahead.

    Steps are made and come out in order, whatever their timing, so a run with it is the same run. An error of ``make``
    is raised where its step is asked for, and nothing is made after it. At most ``depth`` steps are finished or in the
    making beside the one in use. The thread shares Python's lock with the training loop, which gives it up wherever it
    waits for a device or for other ranks.

    Use it in a ``with`` block, or call :meth:`close`: leaving early ends the thread after the step in the making.

        with Ahead(lambda step: plan(batches.take(step)), first=consumed_steps, last=total_steps) as steps:
            for plan in steps:
                train(plan)

    Args:
        make: one step's work. It is called from another thread, one step at a time.
        first: number of the first step, which is how a restarted run continues.
        last: one past the last step; None for no end.
        depth: how many steps to be ahead, at least 1.

    Raises:
        ValueError: for a ``depth`` below 1.
    """

    def __init__(self, make: Callable[[int], T], *, first: int = 0, last: int | None = None, depth: int = 1) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1")
        self._make = make
        self._first = first
        self._last = last
        self._made: Queue[tuple[bool, T | BaseException | None]] = Queue()
        # Counted here rather than by the queue's own size, so that closing can wake a thread that waits for room.
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcore-prefix-tree ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while not self._closed.is_set():
            more, made = self._made.get()
            if not more:
                # Nothing follows an error or the end.
                self.close()
                if isinstance(made, BaseException):
                    raise made
                return
            self._room.release()
            yield made  # type: ignore[misc]  # a step, where more is true

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; steps that wait are dropped. Returns once the step in the making is done."""
        self._closed.set()
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        step = self._first
        while self._last is None or step < self._last:
            self._room.acquire()
            if self._closed.is_set():
                return
            try:
                made = self._make(step)
            except BaseException as error:
                self._made.put((False, error))
                return
            self._made.put((True, made))
            step += 1
        self._made.put((False, None))
