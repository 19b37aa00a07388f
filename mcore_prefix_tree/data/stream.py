"""Lines of files larger than memory: an index of where they begin, samples made when they are asked for.

Memory is 12 bytes a line. The files are gone through once at the start, which finds every bad line before training
begins and how many samples each line makes; the ranks of a job share that work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.jsonl import STDIN, LineOptions, PathLike, no_samples, resolve_paths, samples_of_line
from mcore_prefix_tree.data.skipped import OnError, Skipped, check_on_error
from mcore_prefix_tree.sample import Sample, SampleError

Int64Array = npt.NDArray[np.int64]

_CHUNK_BYTES = 1 << 22
_PROGRESS_BYTES = 1 << 24


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who shares the work of counting.

    Attributes:
        rank: this process.
        size: how many there are; all see the same files.
        gather: everyone's value, by rank.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = _alone


ALONE = Ranks()


class LineIndex:
    """Random access to the lines of some files, blank ones included. Nothing but their offsets is held.

    Args:
        paths: of plain files.

    Raises:
        SampleError: if a file cannot be read from the middle.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        for path in paths:
            if path == STDIN or path.endswith(".gz"):
                name = "standard input" if path == STDIN else path
                raise SampleError(
                    f"{name}: cannot be read from the middle, which streaming does; unpack it into a file, or hold all "
                    "samples in memory (data.streaming=false)"
                )
        self._paths = list(paths)
        self._offsets = [_line_offsets(path) for path in paths]
        lines = [len(offsets) - 1 for offsets in self._offsets]
        self._first_line = np.cumsum([0, *lines])
        self._first_byte = np.cumsum([0, *(int(offsets[-1]) for offsets in self._offsets)])

    def __len__(self) -> int:
        """Lines of all files."""
        return int(self._first_line[-1])

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return int(self._first_byte[-1])

    def bytes_before(self, line: int) -> int:
        """Bytes of all lines before one."""
        file, number = self._place(line)
        return int(self._first_byte[file] + self._offsets[file][number])

    def line_at(self, byte: int) -> int:
        """The first line that begins at or after a byte, in all files together."""
        file = min(int(np.searchsorted(self._first_byte, byte, side="right")), len(self._paths)) - 1
        within = byte - self._first_byte[file]
        number = int(np.searchsorted(self._offsets[file][:-1], within)) if within else 0
        return int(self._first_line[file]) + number

    def read(self, line: int) -> tuple[str, bytes]:
        """``file:line`` and the content of a line.

        Raises:
            SampleError: the file cannot be read any more.
        """
        file, number = self._place(line)
        start, end = self._offsets[file][number : number + 2].tolist()
        source = f"{self._paths[file]}:{number + 1}"
        try:
            # Opened each time: workers share nothing, and a job reads too few lines a second to notice.
            with Path(self._paths[file]).open("rb", buffering=0) as stream:
                raw = os.pread(stream.fileno(), end - start, start)
        except OSError as error:
            raise SampleError(f"{source}: cannot be read: {error}") from error
        return source, raw

    def _place(self, line: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first_line, line, side="right")) - 1
        file = min(file, len(self._paths) - 1)
        return file, line - int(self._first_line[file])


def _line_offsets(path: str) -> Int64Array:
    """int64 ``[lines + 1]``: where each line begins, and the end of the file."""
    found = [np.zeros(1, dtype=np.int64)]
    at = 0
    try:
        with Path(path).open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                found.append(at + 1 + np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")))
                at += len(chunk)
    except OSError as error:
        raise SampleError(f"{path}: cannot be read: {error}") from error
    if found[-1].size == 0 or found[-1][-1] != at:
        found.append(np.array([at], dtype=np.int64))  # the last line does not end with a newline
    return np.concatenate(found)


class StreamedGroups(Sequence[list[Sample]]):
    """The samples of each line, read and encoded when asked for; what a line cannot give was left out once and for all.

    Can be pickled, and read from any number of processes.

    Args:
        paths: as in :func:`mcore_prefix_tree.data.iter_sample_groups`, but no packed files and no standard input.
        options: the same, in one.
        on_error: the same.
        skipped: counts what is left out, the same on every rank.
        ranks: that go through the files together.
        progress: is told bytes done and bytes in all, of this rank's part.

    Raises:
        SampleError: bad data, the first in the order of the files, on every rank.
        ValueError: for another ``on_error``.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        options: LineOptions,
        *,
        on_error: OnError = "raise",
        skipped: Skipped | None = None,
        ranks: Ranks = ALONE,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_on_error(on_error)
        resolved = resolve_paths(paths)
        self._options = options
        self._skips = on_error == "skip"
        self._index = LineIndex(resolved)
        left_out = Skipped()
        self.sizes = self._count(ranks, left_out, progress or (lambda done, total: None))
        if not self.sizes.any():
            raise no_samples(resolved, left_out)
        if skipped is not None:
            skipped.merge(left_out)

    def __len__(self) -> int:
        """Lines, those without samples included."""
        return len(self._index)

    @overload
    def __getitem__(self, line: int) -> list[Sample]: ...
    @overload
    def __getitem__(self, line: slice) -> list[list[Sample]]: ...
    def __getitem__(self, line: int | slice) -> list[Sample] | list[list[Sample]]:
        """The samples of a line.

        Raises:
            SampleError: the file has changed since it was counted.
        """
        if isinstance(line, slice):
            return [self[one] for one in range(len(self))[line]]
        line = range(len(self))[line]  # negative ones count from the end
        source, raw = self._index.read(line)
        samples = samples_of_line(raw, source, self._options, Skipped() if self._skips else None)
        if len(samples) != self.sizes[line]:
            raise SampleError(
                f"{source}: gives {len(samples)} samples where it gave {self.sizes[line]} when the run began; leave "
                "the files alone while it runs"
            )
        return samples

    def _count(self, ranks: Ranks, skipped: Skipped, progress: Callable[[int, int], None]) -> npt.NDArray[np.int32]:
        """Samples of each line. Every rank counts an equal part of the bytes."""
        index = self._index
        borders = [index.line_at(index.total_bytes * rank // ranks.size) for rank in range(ranks.size)] + [len(index)]
        first, last = borders[ranks.rank], borders[ranks.rank + 1]
        begin = index.bytes_before(first) if first < len(index) else index.total_bytes
        end = index.bytes_before(last) if last < len(index) else index.total_bytes
        own = np.zeros(last - first, dtype=np.int32)
        left_out, failure = Skipped(), ""
        told = begin
        try:
            for line in range(first, last):
                source, raw = index.read(line)
                own[line - first] = len(samples_of_line(raw, source, self._options, left_out if self._skips else None))
                now = index.bytes_before(line)
                if now - told >= _PROGRESS_BYTES:
                    told = now
                    progress(now - begin, end - begin)
        except SampleError as error:
            failure = str(error)
        # A rank that failed tells the others instead of leaving them to wait.
        everyone = ranks.gather((own, left_out, failure))
        for _, _, failed in everyone:
            if failed:
                raise SampleError(failed)
        for _, others, _ in everyone:
            skipped.merge(others)
        return np.concatenate([counted for counted, _, _ in everyone])
