"""Samples of each step: a function of the seed and of how much was consumed, so that a run can be resumed.

In folded order, neighbours in the trie fall into the same step. The lines (or groups, or pairs) form a circle in
depth-first order of the trie. Each epoch starts at a random sample of the circle, cuts it into runs, one per step, and
deals the runs in random order. If a line does not fit the rest of a run, one of the next few lines that fits takes its
place, since both parts of a cut line compute the shared tokens.

Over the seeds, each step of an epoch takes each sample with the same probability, as with shuffling: the circle's start
is uniformly random, which settles the steps that an epoch shares with its neighbours, and so is the place of each
other run. Unlike with shuffling, the samples of one step depend on each other.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.fingerprint import checksum
from mcore_prefix_tree.data.stream import StreamedGroups
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.trie import sort_samples
from mcore_prefix_tree.utils.choices import Order
from mcore_prefix_tree.utils.errors import ENDING_SIGNALS

Int64Array = npt.NDArray[np.int64]
Piece = tuple[int, int, int]  # a line's place on the circle, how much of the line comes before the piece, its size

# How many lines may give way to a later one.
_LOOK_AHEAD = 16


def trie_order(lines: Sequence[Sequence[Sample]]) -> Int64Array:
    """Return the lines' indices, int64 ``[n]``, in depth-first order of the trie by each line's longest sample."""
    order, _ = sort_samples([max(line, key=len) for line in lines])
    return order


def deal_runs(sizes: Int64Array, *, step: int, head: int, start: int, rng: np.random.Generator) -> Int64Array:
    """Cut a circle of lines into runs and put the complete runs in random order.

    Args:
        sizes: int64 ``[n]``, size of each line on the circle: its number of samples, or 1 if steps count lines.
        step: size of a run.
        head: size of the first run, which completes the last step of the epoch before; 0 for none. It stays first, and
            the remainder after the last complete run stays last.
        start: position on the circle where the first run begins.

    Returns:
        int64 ``[P, 3]``, the pieces in the order drawn; see :data:`Piece`.
    """
    total = int(sizes.sum())
    head = min(head, total)
    whole = (total - head) // step
    line_starts = np.cumsum(sizes) - sizes
    borders = np.array([0, head, head + whole * step])
    cuts = np.unique(np.concatenate([line_starts, (start + borders) % total]))
    line = np.searchsorted(line_starts, cuts, side="right") - 1
    pieces = np.stack([line, cuts - line_starts[line], np.diff(cuts, append=total)], axis=1)
    along = (cuts - start) % total
    pieces = pieces[np.argsort(along)]
    first, last = np.searchsorted(np.sort(along), borders[1:])
    runs = _runs(pieces[first:last].tolist(), step)
    dealt = [piece for run in rng.permutation(len(runs)).tolist() for piece in runs[run]]
    middle = np.array(dealt, dtype=np.int64).reshape(-1, 3)
    return np.concatenate([pieces[:first], middle, pieces[last:]])


def _runs(pieces: list[Piece], step: int) -> list[list[Piece]]:
    """Return runs of exactly ``step``, cutting few pieces."""
    waiting = deque(pieces)
    runs: list[list[Piece]] = []
    room = 0
    while waiting:
        if not room:
            runs.append([])
            room = step
        fitting = (place for place, (_, _, size) in enumerate(islice(waiting, _LOOK_AHEAD)) if size <= room)
        place = next(fitting, None)
        line, before, size = waiting[place or 0]
        if place is None:
            runs[-1].append((line, before, room))
            waiting[0] = line, before + room, size - room
            room = 0
        else:
            runs[-1].append((line, before, size))
            room -= size
            del waiting[place]
    return runs


_LOOK_S = 1.0


class _Epoch(NamedTuple):
    """Pieces that an epoch draws, in order: lines, samples of the line before each piece, amount consumed after it."""

    number: int
    lines: Int64Array
    first: Int64Array
    ends: Int64Array


class SampleOrder:
    """An endless sequence of samples, epoch after epoch; each epoch takes each sample once.

    The samples of one line stay together, because they share their prefix.

    Args:
        groups: samples of each line, not all empty: a list of lists, or streamed groups.
        order: ``shuffled`` draws the lines in a new order each epoch. ``folded`` deals neighbours in the trie to the
            same step, see above; it requires ``step`` and holds the samples in memory. ``file`` keeps the order of the
            files in every epoch.
        by_line: whether to count consumption in lines instead of samples; a batch then takes complete lines.
        step: number of samples, or lines, per step.
        whole_steps: whether steps take complete lines and no line twice: an epoch ends with its last complete step. If
            steps count samples, all lines have the same number of them, a divisor of ``step``. Requires ``step``.

    Attributes:
        per_epoch: number of samples, or lines, that an epoch draws.
        left_out: number of samples, or lines, that it does not draw.

    Raises:
        ValueError: there are no samples, or not enough for one step; or ``folded`` samples are streamed.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Sample]],
        *,
        seed: int,
        order: Order,
        by_line: bool = False,
        step: int | None = None,
        whole_steps: bool = False,
    ) -> None:
        self.groups = groups
        self.by_line = by_line
        self.order = order
        self.step = step
        self._seed = seed
        self._whole_steps = whole_steps
        assert step is not None or not (whole_steps or order == "folded"), "they are about steps"
        if order == "folded" and self.is_streamed:
            raise ValueError("data.order=folded sorts all samples in memory; set data.streaming=false")
        sizes = groups.sizes if isinstance(groups, StreamedGroups) else np.array([len(group) for group in groups], int)
        self._sizes = sizes.astype(np.int64)
        self._lines = np.flatnonzero(sizes)
        self._drawn: _Epoch | None = None  # the epoch that was asked for last
        if not len(self._lines):
            raise ValueError("the data has no samples to train on")
        count = len(self._lines) if by_line else int(self._sizes.sum())
        self.left_out = count % step if whole_steps and step is not None else 0
        self.per_epoch = count - self.left_out
        if not self.per_epoch:
            setting, things = ("batch.groups_per_step", "groups") if by_line else ("batch.global_batch_size", "samples")
            raise ValueError(
                f"{setting}={step} is more than the {count} {things} in the data, and a step takes none of "
                "them twice; lower it or add data"
            )

    @property
    def is_streamed(self) -> bool:
        """True if samples are read when they are needed."""
        return isinstance(self.groups, StreamedGroups)

    @cached_property
    def checksums(self) -> dict[str, int]:
        """Checksums, by the way of reading, that a resumed run compares."""
        of_all = not self.is_streamed
        return {"read" if of_all else "streamed": checksum(self.groups, self._sizes, all_of_them=of_all)}

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in the first epoch; other epochs may skip lines of other sizes."""
        return self.samples_before(self.per_epoch)

    def samples_before(self, consumed: int) -> int:
        """Return the number of samples in the first ``consumed`` samples, or lines."""
        if not self.by_line:
            return consumed
        epochs, offset = divmod(consumed, self.per_epoch)
        if self.left_out and self.order != "file":
            whole = sum(int(self._sizes[self._epoch(epoch).lines].sum()) for epoch in range(epochs))
        else:
            whole = epochs * int(self._sizes[self._epoch(0).lines].sum())
        return whole + int(self._sizes[self._epoch(epochs).lines[:offset]].sum())

    def take(self, consumed: int, count: int) -> list[Sample]:
        """Return the ``count`` samples, or samples of ``count`` lines, behind the first ``consumed``."""
        with self.stream(consumed) as stream:
            return stream.take(count)

    def first_epoch(self) -> Iterator[list[Sample]]:
        """Yield the samples of each step that begins in the first epoch; needs ``step``."""
        assert self.step is not None
        with self.stream(0) as stream:
            for _ in range(0, self.per_epoch, self.step):
                yield stream.take(self.step)

    def pieces(self, consumed: int) -> Iterator[tuple[int, slice]]:
        """Yield the lines behind the first ``consumed``, for ever, each with what to take of it."""
        number, offset = divmod(consumed, self.per_epoch)
        while True:
            epoch = self._epoch(number)
            for piece in range(int(np.searchsorted(epoch.ends, offset, side="right")), len(epoch.ends)):
                line, first = int(epoch.lines[piece]), int(epoch.first[piece])
                begin, end = int(epoch.ends[piece - 1]) if piece else 0, int(epoch.ends[piece])
                yield line, slice(first + max(0, offset - begin), first + end - begin)
            number, offset = number + 1, 0

    def stream(self, consumed: int, *, num_workers: int = 0) -> SampleStream:
        """Return a stream that starts after the first ``consumed``, read ahead by ``num_workers`` processes if any."""
        return SampleStream(self, consumed, num_workers=num_workers)

    @cached_property
    def _in_trie(self) -> Int64Array:
        """The lines in depth-first order of the trie."""
        return self._lines[trie_order([self.groups[line] for line in self._lines.tolist()])]

    def _epoch(self, number: int) -> _Epoch:
        known = self._drawn
        if known is None or known.number != number:
            rng = np.random.default_rng((self._seed, number))
            if self.order == "folded":
                lines, first, counts = self._deal(number, rng)
            else:
                lines = self._lines if self.order == "file" else self._lines[rng.permutation(len(self._lines))]
                first, counts = np.zeros(len(lines), dtype=np.int64), self._counts(lines)
            ends = np.cumsum(counts)
            drawn = int(np.searchsorted(ends, self.per_epoch)) + 1
            # At once: a step may be read ahead in another thread.
            known = self._drawn = _Epoch(number, lines[:drawn], first[:drawn], ends[:drawn])
        return known

    def _deal(self, number: int, rng: np.random.Generator) -> tuple[Int64Array, Int64Array, Int64Array]:
        assert self.step is not None
        counts = self._counts(self._in_trie)
        total = int(counts.sum())
        # If steps take complete lines, which all count the same, runs begin at a line; else at any sample.
        grain = int(counts[0]) if self._whole_steps else 1
        line, first, count = deal_runs(
            counts,
            step=self.step,
            head=0 if self._whole_steps else -number * total % self.step,
            start=grain * int(rng.integers(total // grain)),
            rng=rng,
        ).T
        return self._in_trie[line], first, count

    def _counts(self, lines: Int64Array) -> Int64Array:
        """Return the amount that each line consumes: int64 ``[n]`` for the lines ``[n]``."""
        return np.ones(len(lines), dtype=np.int64) if self.by_line else self._sizes[lines]


class SampleStream(AbstractContextManager["SampleStream"]):
    """Samples in an order, one batch after another, from the first that is not ``consumed``.

    Workers are those of a torch ``DataLoader``: each reads and encodes complete lines, a bounded number ahead, or a
    line when it is requested with ``num_workers=0``. They run until :meth:`close`, the end of a ``with`` block or of
    the process, and ignore a scheduler's signals to all processes: the main process may have a checkpoint to save.
    """

    def __init__(self, order: SampleOrder, consumed: int, *, num_workers: int = 0) -> None:
        self.consumed = consumed
        self._rest: list[Sequence[Sample]] = []
        lines: Any = _Lines(order.groups, by_line=order.by_line)
        self._lines: Iterator[list[Sequence[Sample]] | Exception] = map(lines.__getitem__, order.pieces(consumed))
        if num_workers and order.is_streamed:
            from torch.utils.data import DataLoader  # takes its time, and only training with workers needs it

            # A worker is a fork. It must not finalize objects that this process dropped but has not collected, for
            # example process groups and autograd graphs: it does not have their threads.
            gc.freeze()
            try:
                self._lines = iter(
                    DataLoader(
                        lines,
                        sampler=cast("Any", order.pieces(consumed)),
                        batch_size=None,
                        num_workers=num_workers,
                        collate_fn=_as_it_is,
                        worker_init_fn=_live_as_long_as_the_main_process,
                    )
                )
            except OSError as error:
                reason = f"the processes cannot start: {error.strerror}"
                raise OSError(error.errno, reason, f"data.num_workers={num_workers}") from error
            finally:
                gc.unfreeze()
            # At its exit Python would end workers by a signal that they ignore, and wait for them for ever.
            atexit.register(self.close)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def take(self, count: int) -> list[Sample]:
        """Return the next ``count`` samples, or samples of as many lines; raises SampleError if a file has changed."""
        while len(self._rest) < count:
            more = next(self._lines)
            if isinstance(more, Exception):
                raise more
            self._rest += more
        taken, self._rest = self._rest[:count], self._rest[count:]
        self.consumed += count
        return list(chain.from_iterable(taken))

    def close(self) -> None:
        """End the workers."""
        self._lines = iter(())
        atexit.unregister(self.close)


class _Lines:
    """A worker's data set: torch asks it for one place after another, and gets what a step counts as one each."""

    def __init__(self, groups: Sequence[Sequence[Sample]], *, by_line: bool) -> None:
        self._groups, self._by_line = groups, by_line

    def __getitem__(self, place: tuple[int, slice]) -> list[Sequence[Sample]] | Exception:
        line, part = place
        try:
            samples = self._groups[line]
        except (SampleError, MemoryError, OSError) as error:
            return error  # torch would wrap it into a traceback
        return [samples][part] if self._by_line else [[sample] for sample in samples[part]]


def _as_it_is(group: Any) -> Any:
    return group


def _live_as_long_as_the_main_process(worker: int) -> None:
    # Without its workers it could not reach its checkpoint.
    for ending in ENDING_SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    # torch's worker also notices that its parent was killed, but then waits until its prefetched batches are taken.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
