"""Which samples each step takes: a function of the seed and of how much was consumed, so it can be resumed."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.same import checksum
from mcore_prefix_tree.data.stream import StreamedGroups
from mcore_prefix_tree.sample import Sample, SampleError

Int64Array = npt.NDArray[np.int64]

# By which terminals, torchrun, Slurm and other schedulers tell all processes of a job, workers too, that its end comes.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 1.0


class SampleOrder:
    """An endless sequence of samples, epoch after epoch.

    Lines are drawn in a new order each epoch; the samples of one line stay together, because they share their prefix.

    Args:
        groups: the samples of each line, at least one sample in all: a list of lists, or what reads them as needed.
        seed: of the order.
        shuffle: False keeps the order of the files in every epoch.
        by_line: what is consumed is counted in lines and not in samples; so a batch takes whole lines, however many
            samples each has.
        whole_steps: of how many samples, or lines, if steps take whole lines and no line twice: an epoch then ends with
            its last whole step. Counted in samples, all lines have as many, a divisor of that.

    Attributes:
        per_epoch: how many samples, or lines, an epoch draws.
        left_out: how many it draws less than there are.

    Raises:
        ValueError: there are no samples, or not enough for one step.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Sample]],
        *,
        seed: int,
        shuffle: bool,
        by_line: bool = False,
        whole_steps: int | None = None,
    ) -> None:
        self.groups = groups
        self.by_line = by_line
        self._seed = seed
        self._shuffle = shuffle
        sizes = groups.sizes if isinstance(groups, StreamedGroups) else np.array([len(group) for group in groups], int)
        self._sizes = sizes.astype(np.int64)
        self._lines = np.flatnonzero(sizes)
        # Of the epoch that was asked for last: its number, lines, and what is consumed at the end of each line.
        self._drawn: tuple[int, Int64Array, Int64Array] | None = None
        if not len(self._lines):
            raise ValueError("there are no samples to train on")
        count = len(self._lines) if by_line else int(self._sizes.sum())
        self.left_out = 0 if whole_steps is None else count % whole_steps
        self.per_epoch = count - self.left_out
        if not self.per_epoch:
            setting, things = ("groups_per_step", "groups") if by_line else ("global_batch_size", "samples")
            raise ValueError(
                f"batch.{setting}={whole_steps} is more than the {count} {things} there are, and a step takes none of "
                "them twice; lower it or add data"
            )

    @property
    def is_streamed(self) -> bool:
        """Whether samples are read as they are needed."""
        return isinstance(self.groups, StreamedGroups)

    @cached_property
    def checksums(self) -> dict[str, int]:
        """What the same samples have again when a run resumes, by how they were read."""
        of_all = not self.is_streamed
        return {"read" if of_all else "streamed": checksum(self.groups, self._sizes, all_of_them=of_all)}

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the first epoch draws; others draw as many, but where lines of other sizes are left out."""
        return self.samples_before(self.per_epoch)

    def samples_before(self, consumed: int) -> int:
        """How many samples the first ``consumed`` samples, or lines, are."""
        if not self.by_line:
            return consumed
        epochs, offset = divmod(consumed, self.per_epoch)
        if self.left_out and self._shuffle:
            whole = sum(int(self._sizes[self._order_of(epoch)[0]].sum()) for epoch in range(epochs))
        else:
            whole = epochs * int(self._sizes[self._order_of(0)[0]].sum())
        return whole + int(self._sizes[self._order_of(epochs)[0][:offset]].sum())

    def take(self, consumed: int, count: int) -> list[Sample]:
        """The ``count`` samples, or lines' samples, that follow the first ``consumed``; may reach into a next epoch."""
        with self.stream(consumed) as stream:
            return stream.take(count)

    def lines(self, consumed: int) -> Iterator[tuple[int, int]]:
        """The lines that follow the first ``consumed``, for ever; of each, how many of its samples are consumed."""
        epoch, offset = divmod(consumed, self.per_epoch)
        while True:
            drawn, ends = self._order_of(epoch)
            at = int(np.searchsorted(ends, offset, side="right"))
            first = offset - int(ends[at - 1]) if at else offset
            for line in drawn[at:].tolist():
                yield line, first
                first = 0
            epoch, offset = epoch + 1, 0

    def stream(self, consumed: int, *, num_workers: int = 0) -> SampleStream:
        """What follows the first ``consumed`` samples, or lines, read ahead by worker processes if there are any."""
        return SampleStream(self, consumed, num_workers=num_workers)

    def _order_of(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The lines of an epoch as they are drawn, and how much is consumed at the end of each."""
        known = self._drawn
        if known is None or known[0] != epoch:
            lines = self._lines
            if self._shuffle:
                lines = lines[np.random.default_rng((self._seed, epoch)).permutation(len(lines))]
            ends = np.arange(1, len(lines) + 1) if self.by_line else np.cumsum(self._sizes[lines])
            drawn = int(np.searchsorted(ends, self.per_epoch)) + 1
            known = epoch, lines[:drawn], ends[:drawn]
            self._drawn = known  # at once: a step may be read ahead in another thread
        return known[1:]


class SampleStream:
    """Samples in an order, one batch after another.

    Workers are those of a torch ``DataLoader``: each reads and encodes whole lines, a bounded number ahead. They start
    when the stream is made and end with :meth:`close`, a ``with`` block or the process, however that ends. Signals that
    a scheduler sends to all processes are for the main one to heed, which may have a checkpoint to save.

    Args:
        order: of the samples.
        consumed: how many of them, or of its lines, come before the first.
        num_workers: processes; 0 reads a line when it is asked for.
    """

    def __init__(self, order: SampleOrder, consumed: int, *, num_workers: int = 0) -> None:
        self.consumed = consumed
        self._by_line = order.by_line
        self._rest: list[Sample] = []
        self._groups: Iterator[Sequence[Sample] | SampleError] = (
            order.groups[line][first:] for line, first in order.lines(consumed)
        )
        if num_workers and order.is_streamed:
            self._groups = iter(_loader(order, consumed, num_workers))
            # At its exit Python would end workers by a signal that they ignore, and wait for them for ever.
            atexit.register(self.close)

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def take(self, count: int) -> list[Sample]:
        """The next ``count`` samples, or the samples of as many lines.

        Raises:
            SampleError: a file has changed since the run began.
        """
        if self._by_line:
            taken = [sample for _ in range(count) for sample in self._next()]
        else:
            taken, self._rest = self._rest[:count], self._rest[count:]
            while len(taken) < count:
                group, missing = self._next(), count - len(taken)
                taken += group[:missing]
                self._rest = list(group[missing:])
        self.consumed += count
        return taken

    def _next(self) -> Sequence[Sample]:
        group = next(self._groups)
        if isinstance(group, SampleError):
            raise group
        return group

    def close(self) -> None:
        """End the workers."""
        self._groups = iter(())
        atexit.unregister(self.close)


def _loader(order: SampleOrder, consumed: int, num_workers: int) -> Iterable[Sequence[Sample] | SampleError]:
    from torch.utils.data import DataLoader  # takes its time, and only training with workers needs it

    lines: Any = _Lines(order.groups)
    return DataLoader(
        lines,
        sampler=_Places(order, consumed),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_live_as_long_as_the_main_process,
    )


def _live_as_long_as_the_main_process(worker: int) -> None:
    # Without its workers it could not go on to its checkpoint.
    for ending in ENDING_SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    # torch's worker notices too that its parent was killed, but then waits for what it read ahead to be taken.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


class _Lines:
    """What a worker has: torch asks it for one place after another."""

    def __init__(self, groups: Sequence[Sequence[Sample]]) -> None:
        self._groups = groups

    def __getitem__(self, place: tuple[int, int]) -> Sequence[Sample] | SampleError:
        line, first = place
        try:
            return self._groups[line][first:]
        except SampleError as error:
            return error  # torch would wrap it into a traceback


class _Places:
    def __init__(self, order: SampleOrder, consumed: int) -> None:
        self._order, self._consumed = order, consumed

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self._order.lines(self._consumed)


def _as_it_is(group: Sequence[Sample] | SampleError) -> Sequence[Sample] | SampleError:
    return group
