"""A job's samples, as every rank reads them."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.files import resolve_paths
from mcore_prefix_tree.data.fingerprint import check_same_samples
from mcore_prefix_tree.data.grouping import whole_groups, with_later_turns
from mcore_prefix_tree.data.jsonl import STDIN
from mcore_prefix_tree.data.on_disk import map_objects, write_object
from mcore_prefix_tree.data.read import iter_sample_groups
from mcore_prefix_tree.data.records import LineOptions
from mcore_prefix_tree.data.skipped import Skipped
from mcore_prefix_tree.data.stream import StreamedGroups
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import GroupedBy
from mcore_prefix_tree.utils.choices import OnError, Order
from mcore_prefix_tree.utils.errors import naming_memory
from mcore_prefix_tree.utils.ranks import ALONE, Ranks

T = TypeVar("T")
_CHECKED_AT_ONCE = 64
_ARRAYS, _HEAD = "arrays", "head"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The samples that a job takes, and their order."""

    paths: Sequence[str]
    options: LineOptions
    seed: int
    order: Order
    step: int  # number of samples per step, or of its units if ``counts_units``, regardless of their sizes
    grouped_by: GroupedBy | None = None  # kind of unit that a step takes as one; None for single samples
    counts_units: bool = False
    whole_steps: bool = False  # whether an epoch drops the units that do not fill a step
    on_error: OnError = "raise"
    is_streamed: bool = False  # whether samples are read when a step needs them
    objective: str = ""  # setting that names the objective, for messages
    ranks: Ranks = ALONE

    def read(
        self,
        *,
        check: Callable[[Sequence[Sample]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        is_scored: bool = True,
    ) -> tuple[SampleOrder, Skipped]:
        """Read all samples, or their places; all ranks together. Return them in order, and the skipped ones.

        Standard input reaches one process only: the main rank reads it for all.

        Args:
            check: check of complete groups, before the first step, that no sample lacks a field that the objective
                reads.
            progress: function for streamed samples, called with the bytes read and the bytes in all.
            is_scored: whether a loss is computed, which requires at least one scored token.

        Raises:
            SampleError: bad data, with file, line and field; different data, with the ranks; or no scored token.
            ValueError: the data has fewer samples than a step of complete units takes.
        """
        skipped = Skipped()
        groups: Sequence[Sequence[Sample]]
        if self.is_streamed:
            with _naming_what_was_left_out(skipped):
                groups = StreamedGroups(
                    list(self.paths),
                    self.options,
                    on_error=self.on_error,
                    skipped=skipped,
                    ranks=self.ranks,
                    progress=progress,
                    check=check,
                    grouped_by=self.grouped_by,
                    step=self._samples_of_a_step,
                    setting=self.objective,
                    joins_turns=self.order != "file",
                )
        else:
            groups, skipped = self._whole(self.paths, self.grouped_by, self._samples_of_a_step, check, progress)
        if is_scored:
            _check_scored(groups, self.paths, "data.path")
        return self._in_order(groups), skipped

    def of_lines(self, lines: Sequence[Sequence[Sample]]) -> SampleOrder:
        """Return samples in memory in the order that steps take them; raises as :meth:`read`."""
        return self._in_order(self._joined(lines, self.grouped_by, self._samples_of_a_step))

    def _in_order(self, groups: Sequence[Sequence[Sample]]) -> SampleOrder:
        return SampleOrder(
            groups,
            seed=self.seed,
            order=self.order,
            by_line=self.counts_units,
            step=self.step,
            whole_steps=self.whole_steps,
        )

    def held_out(
        self, paths: Sequence[str], by: GroupedBy | None, check: Callable[[Sequence[Sample]], None], *, setting: str
    ) -> tuple[Sequence[Sequence[Sample]], Skipped]:
        """Return all samples of other files, held in memory and read as these are, and the skipped ones.

        Units ``by``, lines for None, stay together. Raises as :meth:`read`, or SampleError, with ``setting``, without
        samples.
        """
        groups, skipped = replace(self, options=self.options.lenient())._whole(paths, by, None, check)
        _check_scored(groups, paths, setting)
        return groups, skipped

    def _whole(
        self,
        paths: Sequence[str],
        by: GroupedBy | None,
        step: int | None,
        check: Callable[[Sequence[Sample]], None] | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Sequence[Sequence[Sample]], Skipped]:
        lines, skipped = self._lines(paths, progress)
        with _naming_what_was_left_out(skipped):
            groups = self._joined(lines, by, step)
            if check is not None:
                for start in range(0, len(groups), _CHECKED_AT_ONCE):
                    check(list(chain.from_iterable(groups[start : start + _CHECKED_AT_ONCE])))
        return groups, skipped

    def _joined(
        self, lines: Sequence[Sequence[Sample]], by: GroupedBy | None, step: int | None
    ) -> Sequence[Sequence[Sample]]:
        if by is None:
            # An order could separate the turns of a rollout that are in separate lines.
            return with_later_turns(lines) if self.order != "file" else lines
        return whole_groups(lines, by, step=step, setting=self.objective)

    def _seen(self, paths: Sequence[str]) -> object:
        """Return what tells whether another process sees the same files; this rank's number if it sees none."""
        try:
            found = [os.stat(path) for path in resolve_paths(paths)]
        except (SampleError, OSError, ImportError):  # which reading reports
            return self.ranks.rank
        return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]

    @property
    def _samples_of_a_step(self) -> int | None:
        return None if self.counts_units else self.step

    def _lines(
        self, paths: Sequence[str], progress: Callable[[int, int], None] | None
    ) -> tuple[list[list[Sample]], Skipped]:
        def read() -> tuple[list[list[Sample]], Skipped]:
            skipped = Skipped()
            lines = iter_sample_groups(paths, self.options, on_error=self.on_error, skipped=skipped, progress=progress)
            return list(lines), skipped

        with naming_memory(lambda: f"the samples of {', '.join(paths)} do not fit; set data.streaming=true"):
            if STDIN in paths and self.ranks.size > 1:
                read_once: tuple[list[list[Sample]], Skipped] = self.ranks.on_main(read)
                return read_once
            lines, skipped = read() if self.ranks.size == 1 else once_per_node(read, self.ranks, self._seen(paths))
        check_same_samples(lines, resolve_paths(paths), self.ranks)
        return lines, skipped


@contextmanager
def _naming_what_was_left_out(skipped: Skipped) -> Iterator[None]:
    """Add the skipped samples to errors: without them a group or a pair may be incomplete."""
    try:
        yield
    except SampleError as error:
        if skipped and str(skipped) not in str(error):
            raise SampleError(f"{error} ({skipped})") from None
        raise


def _check_scored(groups: Sequence[Sequence[Sample]], paths: Sequence[str], setting: str) -> None:
    """Raise SampleError if no token is scored: a loss of 0 would look like one that was computed."""
    if not any(sample.is_scored for group in groups for sample in group):  # of streamed ones, the first is read
        raise SampleError(
            f"{', '.join(paths)}: no token is scored, so {setting} has no loss; give samples with an assistant turn, "
            "or with a 'loss_mask' that is above 0 behind the first token"
        )


def once_per_node(action: Callable[[], T], ranks: Ranks, files: object) -> T:
    """Return the result of an action, which the first rank of each machine with the same ``files`` runs; all together.

    The others find the result in a file, and share the pages of its arrays. A rank that cannot read it, for example in
    a container of its own, or for which no room was left, runs the action too. An error is raised on all
    ranks.
    """
    hosts: list[object] = ranks.gather((socket.gethostname(), files))
    first = hosts.index(hosts[ranks.rank])
    result: T | None = None
    folder: str | None = None
    failure: Exception | None = None
    with ExitStack() as stack:
        if ranks.rank == first:
            try:
                result = action()
                if hosts.count(hosts[first]) > 1:
                    room = stack.enter_context(TemporaryDirectory(prefix="mcore_prefix_tree-"))
                    with (Path(room) / _ARRAYS).open("wb") as stream:
                        (Path(room) / _HEAD).write_bytes(pickle.dumps(write_object(result, stream)))
                    folder = room
            except (ValueError, OSError, MemoryError) as error:
                failure = error if result is None else None  # otherwise the disk is full
        told: list[tuple[str | None, Exception | None]] = ranks.gather((folder, failure))
        for _, fault in told:
            if fault is not None:
                raise fault
        if ranks.rank != first and told[first][0] is not None:
            room = str(told[first][0])
            with suppress(OSError), (Path(room) / _ARRAYS).open("rb") as stream:
                (result,) = map_objects([pickle.loads((Path(room) / _HEAD).read_bytes())], stream)
        if result is None:
            result = action()
        ranks.gather(None)  # all have opened it
    return result
