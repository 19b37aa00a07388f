"""Which samples each step takes: a function of the seed and of how many samples were consumed, so it can be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.stream import StreamedGroups
from mcore_prefix_tree.sample import Sample, SampleError

Int64Array = npt.NDArray[np.int64]


class SampleOrder:
    """An endless sequence of samples, epoch after epoch.

    Lines are drawn in a new order each epoch; the samples of one line stay together, because they share their prefix.

    Args:
        groups: the samples of each line, at least one sample in all: a list of lists, or what reads them as needed.
        seed: of the order.
        shuffle: False keeps the order of the files in every epoch.
        whole_steps: of how many samples, if steps take whole lines and no line twice: an epoch then ends with its last
            whole step. All lines have as many samples, a divisor of that.

    Attributes:
        samples_per_epoch: how many are drawn.
        left_out: how many an epoch draws less than there are.

    Raises:
        ValueError: there are no samples, or not enough for one step.
    """

    def __init__(
        self, groups: Sequence[Sequence[Sample]], *, seed: int, shuffle: bool, whole_steps: int | None = None
    ) -> None:
        self.groups = groups
        self._seed = seed
        self._shuffle = shuffle
        sizes = groups.sizes if isinstance(groups, StreamedGroups) else np.array([len(group) for group in groups], int)
        self._lines = np.flatnonzero(sizes)
        self._sizes = sizes[self._lines]
        # Of the epoch that was asked for last: its number, lines, and samples up to the end of each line.
        self._drawn: tuple[int, Int64Array, Int64Array] | None = None
        samples = int(self._sizes.sum())
        if not samples:
            raise ValueError("there are no samples to train on")
        self.left_out = 0 if whole_steps is None else samples % whole_steps
        self.samples_per_epoch = samples - self.left_out
        if not self.samples_per_epoch:
            raise ValueError(
                f"batch.global_batch_size={whole_steps} is more than the {samples} samples there are, and a step takes "
                "none of them twice; lower it or add data"
            )

    @property
    def is_streamed(self) -> bool:
        """Whether samples are read as they are needed."""
        return isinstance(self.groups, StreamedGroups)

    def take(self, consumed: int, count: int) -> list[Sample]:
        """The ``count`` samples that follow the first ``consumed`` ones; a batch may reach into the next epoch."""
        return _take((self.groups[line][first:] for line, first in self.lines(consumed)), count) if count else []

    def lines(self, consumed: int) -> Iterator[tuple[int, int]]:
        """The lines that follow the first ``consumed`` samples, for ever; of each, how many samples are consumed."""
        epoch, offset = divmod(consumed, self.samples_per_epoch)
        while True:
            drawn, ends = self._order_of(epoch)
            at = int(np.searchsorted(ends, offset, side="right"))
            first = offset - int(ends[at - 1]) if at else offset
            for line in drawn[at:].tolist():
                yield line, first
                first = 0
            epoch, offset = epoch + 1, 0

    def stream(self, consumed: int, *, num_workers: int = 0) -> SampleStream:
        """The samples that follow the first ``consumed`` ones, read ahead by worker processes if there are any."""
        return SampleStream(self, consumed, num_workers=num_workers)

    def _order_of(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The lines of an epoch as they are drawn, and how many samples there are up to the end of each."""
        known = self._drawn
        if known is None or known[0] != epoch:
            order = np.arange(len(self._lines))
            if self._shuffle:
                order = np.random.default_rng((self._seed, epoch)).permutation(len(self._lines))
            ends = np.cumsum(self._sizes[order], dtype=np.int64)
            drawn = int(np.searchsorted(ends, self.samples_per_epoch)) + 1
            known = epoch, self._lines[order[:drawn]], ends[:drawn]
            self._drawn = known  # at once: a step may be read ahead in another thread
        return known[1:]


class SampleStream:
    """Samples in an order, one batch after another.

    Workers are those of a torch ``DataLoader``: each reads and encodes whole lines, a bounded number ahead. They start
    when the stream is made and end with :meth:`close` or a ``with`` block.

    Args:
        order: of the samples.
        consumed: how many of them come before the first.
        num_workers: processes; 0 reads a line when it is asked for.
    """

    def __init__(self, order: SampleOrder, consumed: int, *, num_workers: int = 0) -> None:
        self.consumed = consumed
        self._rest: list[Sample] = []
        self._groups: Iterator[Sequence[Sample] | SampleError] = (
            order.groups[line][first:] for line, first in order.lines(consumed)
        )
        if num_workers and order.is_streamed:
            self._groups = iter(_loader(order, consumed, num_workers))

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def take(self, count: int) -> list[Sample]:
        """The next ``count`` samples.

        Raises:
            SampleError: a file has changed since the run began.
        """
        taken, self._rest = self._rest[:count], self._rest[count:]
        while len(taken) < count:
            group = next(self._groups)
            if isinstance(group, SampleError):
                raise group
            missing = count - len(taken)
            taken += group[:missing]
            self._rest = list(group[missing:])
        self.consumed += count
        return taken

    def close(self) -> None:
        """End the workers."""
        self._groups = iter(())


def _take(groups: Iterable[Sequence[Sample]], count: int) -> list[Sample]:
    taken: list[Sample] = []
    for group in groups:
        taken += group[: count - len(taken)]
        if len(taken) == count:
            break
    return taken


def _loader(order: SampleOrder, consumed: int, num_workers: int) -> Iterable[Sequence[Sample] | SampleError]:
    from torch.utils.data import DataLoader  # takes its time, and only training with workers needs it

    lines: Any = _Lines(order.groups)
    return DataLoader(
        lines,
        sampler=_Places(order, consumed),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
    )


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
