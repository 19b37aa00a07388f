"""The next step's work, done in the background while the current step computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Ahead(Generic[K, T]):
    """Makes steps by name with ``make``, in another thread, one ahead of the step in use.

    The steps that come out are those requested, in any timing, and no two calls of ``make`` overlap. The thread shares
    Python's lock with the training loop, which releases it whenever it waits for a device or for other ranks.
    """

    def __init__(self, make: Callable[[K], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mcore-prefix-tree ahead")
        self._next: tuple[K, Future[T]] | None = None

    def take(self, step: K, *, then: K | None) -> T:
        """Return a step, begun by the last call or made now, or raise ``make``'s exception; begin the step ``then``."""
        made = self._made(step)
        self._next = None if then is None else (then, self._thread.submit(self._make, then))
        return made

    def close(self) -> None:
        """End the thread, once the step in the making is done."""
        self._thread.shutdown(cancel_futures=True)

    def _made(self, step: K) -> T:
        begun, self._next = self._next, None
        if begun is not None:
            # Whether it is the right one or not: nothing is made by two threads at a time.
            wait([begun[1]])
            if begun[0] == step:
                return begun[1].result()
        return self._make(step)
