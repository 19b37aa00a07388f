"""Records of files larger than memory: an index of their places, and samples made when they are requested.

Memory is 13 bytes per line, or 5 bytes per row and the most recent chunks of tables; grouped records take another 8
bytes per record and 12 per group. One pass at the start, shared by the ranks of a job, finds every bad record before
training begins, and counts the samples of each record. Groups of separate records are read once more, and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import overload

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.files import PathLike, index_files, no_samples, resolve_paths
from mcore_prefix_tree.data.fingerprint import check_same_files
from mcore_prefix_tree.data.records import LineOptions, Record, samples_of_record
from mcore_prefix_tree.data.skipped import Skipped, check_on_error
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.utils.choices import OnError
from mcore_prefix_tree.utils.ranks import ALONE, Ranks

Turn = tuple[Hashable, int]


def read_turn(sample: Sample) -> Turn | None:
    """Return the rollout and the turn of a sample; None unless it names both."""
    rollout, turn = sample.signals.unit("rollout"), sample.signals.turn
    return None if rollout is None or turn is None else (rollout, turn)


def goes_on(before: Turn | None, turn: Turn | None) -> bool:
    """Return whether a turn is a later one of the rollout that the turn before it belongs to."""
    return before is not None and turn is not None and before[0] == turn[0] and before[1] < turn[1]


def with_later_turns(lines: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Join neighbouring lines that hold successive turns of a rollout, for example from ``score``."""
    joined: list[list[Sample]] = []
    last = None
    for line in lines:
        if line and joined and goes_on(last, read_turn(line[0])):
            joined[-1] += line
        else:
            joined.append(list(line))
        last = read_turn(line[-1]) if line else last
    return joined


Int64Array = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]

_PROGRESS_BYTES = 1 << 24


class FileIndex:
    """Random access to the records of some plain files, numbered together; see :func:`index_files`."""

    def __init__(self, paths: Sequence[str], names: FieldNames = OUR_NAMES) -> None:
        self._files = index_files(paths, names)
        self._first_record = np.cumsum([0, *map(len, self._files)])
        self._first_byte = np.cumsum([0, *(file.size for file in self._files)])

    def __len__(self) -> int:
        """Records of all files."""
        return int(self._first_record[-1])

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self._first_byte[-1])

    def bytes_before(self, record: int) -> int:
        """Return the bytes of all records before one."""
        if record == len(self):
            return self.total_bytes
        file, number = self._place(record)
        return int(self._first_byte[file]) + self._files[file].offset(number)

    def record_at(self, byte: int) -> int:
        """Return the first record that begins at or after a byte, in all files together."""
        file = min(int(np.searchsorted(self._first_byte, byte, side="right")), len(self._files)) - 1
        within = int(byte - self._first_byte[file])
        return int(self._first_record[file]) + (self._files[file].first_at(within) if within else 0)

    def read(self, record: int) -> Record:
        """Return a record; raises SampleError if its file has changed or cannot be read any more."""
        file, number = self._place(record)
        return self._files[file].read(number)

    def _place(self, record: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first_record, record, side="right")) - 1
        file = min(file, len(self._files) - 1)
        return file, record - int(self._first_record[file])


class StreamedGroups(Sequence[list[Sample]]):
    """The samples of each record, read and encoded when requested; bad samples were skipped at the start.

    With a ``key``, the samples of each group: of all records with the same key, in any place. Can be pickled, and read
    from any number of processes.

    Args:
        paths: files as :func:`mcore_prefix_tree.data.iter_sample_groups` takes them, without packed files and standard
            input.
        skipped: counter of skipped samples, the same on every rank.
        ranks: ranks that share the first pass.
        progress: function called with the bytes done and all bytes of this rank's part.
        key: function that returns a string, a number or a tuple of them for a sample, the same for all of one record;
            None for a record that is a separate group.
        check: function called with the samples of each record, or group; the text of its SampleError becomes ``fault``.
        check_apart: function called with the samples of each group that has others between its records. It and ``key``
            may raise SampleError.
        joins_turns: whether neighbouring records that hold one turn after another of a rollout are a group. Without it,
            and without ``key``, each record is one.

    Attributes:
        sizes: int32 ``[len(self)]``, number of samples of each record, or group.

    Raises:
        SampleError: bad data, the first in the order of the files, on every rank; or other files on some rank, see
            :func:`mcore_prefix_tree.data.fingerprint.check_same_files`.
        ValueError: ``on_error`` has another value.
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
        key: Callable[[Sample], Hashable] | None = None,
        check: Callable[[list[Sample]], None] | None = None,
        check_apart: Callable[[list[Sample]], None] | None = None,
        joins_turns: bool = False,
    ) -> None:
        check_on_error(on_error)
        resolved = resolve_paths(paths)
        self._options = options
        self._skips = on_error == "skip"
        self._index = FileIndex(resolved, options.names)
        # The records of all groups, one group behind the other, and where each group begins in them. None if each
        # record is a group.
        self._members: Int64Array | None = None
        self._begins = np.zeros(1, dtype=np.int64)
        self.fault = ""
        index, size = self._index, ranks.size
        check_same_files(
            len(index), resolved, lambda record: samples_of_record(index.read(record), options, Skipped()), ranks
        )
        borders = [*(index.record_at(index.total_bytes * rank // size) for rank in range(size)), len(index)]
        records = range(*borders[ranks.rank : ranks.rank + 2])
        everyone: list[_Found] = ranks.gather(
            _go_through(index, records, options, skips=self._skips, progress=progress, key=key, check=check)
        )
        _raise_failure(everyone, resolved, options, skipped)
        self.is_scored = any(found.is_scored for found in everyone)
        self.sizes = self._record_sizes = np.concatenate([found.sizes for found in everyone])
        if key is None:
            self.fault = next((found.fault for found in everyone if found.fault), "")
            if joins_turns:
                self._join_turns(everyone)
            return
        group_of, is_apart = self._join(np.concatenate([found.digests for found in everyone]))
        fault = self._check_again(np.flatnonzero(is_apart), check_apart, ranks)
        if fault:
            raise SampleError(fault)
        self.fault, again = self._faults_of_parts(everyone, borders, group_of, is_apart)
        if not self.fault:
            self.fault = self._check_again(np.flatnonzero(again), check, ranks)

    def _faults_of_parts(
        self, everyone: Sequence[_Found], borders: Sequence[int], group_of: Int64Array, is_apart: npt.NDArray[np.bool_]
    ) -> tuple[str, npt.NDArray[np.bool_]]:
        """Return the first fault in a complete group, or "", and, bool ``[G]``, the groups to check once more."""
        # A group checked while its records were read was complete, unless it continues at another rank or in separate
        # records. A rank that found a fault in a part of a group has not examined later groups.
        filled = np.flatnonzero(self._record_sizes)
        first, end = np.searchsorted(filled, borders[:-1]), np.searchsorted(filled, borders[1:])
        again = is_apart.copy()
        again[group_of[first[first < end]]] = again[group_of[end[first < end] - 1]] = True
        fault = ""
        for found, one, other in zip(everyone, first, end, strict=True):
            if found.fault and again[group_of[np.searchsorted(filled, found.fault_at)]]:
                again[group_of[one:other]] = True
            elif found.fault and not fault:
                fault = found.fault
        return fault, again

    def _join(self, digests: Digests) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return each non-empty record's group, int64 ``[n]``, and whether others lie inside a group, bool ``[G]``."""
        records = np.flatnonzero(self._record_sizes)
        of_record = digests[records]
        order = np.lexsort((of_record[:, 1], of_record[:, 0]))  # stable: the records of a group stay in order
        is_first = np.append(True, (of_record[order[1:]] != of_record[order[:-1]]).any(axis=1))
        numbers = np.empty(int(is_first.sum()), dtype=np.int64)
        numbers[np.argsort(order[is_first])] = np.arange(len(numbers))
        groups = np.empty(len(records), dtype=np.int64)
        groups[order] = numbers[np.cumsum(is_first) - 1]
        by_group = np.argsort(groups, kind="stable")
        ends = np.cumsum(np.bincount(groups))
        self._members, self._begins = records[by_group], np.append(0, ends)
        begins = self._begins[:-1]
        self.sizes = np.add.reduceat(self._record_sizes[self._members], begins).astype(np.int32)
        return groups, by_group[ends - 1] - by_group[begins] != ends - begins - 1

    def _join_turns(self, everyone: Sequence[_Found]) -> None:
        """Join neighbouring records that hold one turn after another of a rollout."""
        goes_on_here, last = [], None
        for found in everyone:
            follows = found.goes_on.copy()
            if found.first_place >= 0:
                follows[found.first_place] = goes_on(last, found.first_turn)
                last = found.last_turn
            goes_on_here.append(follows)
        follows = np.concatenate(goes_on_here)
        if not follows.any():
            return
        self._members = np.flatnonzero(self._record_sizes)
        begins = np.flatnonzero(~follows[self._members])
        self._begins = np.append(begins, len(self._members))
        self.sizes = np.add.reduceat(self._record_sizes[self._members], begins).astype(np.int32)

    def _check_again(
        self,
        groups: Int64Array,
        check: Callable[[list[Sample]], None] | None,
        ranks: Ranks,
    ) -> str:
        """Return the first fault of some groups, int64 ``[n]``, which the ranks share, or ""."""
        own: tuple[int, str] | None = None
        if check is not None:
            for group in groups[ranks.rank :: ranks.size].tolist():
                fault = self._find_fault(group, check)
                if fault:
                    own = group, fault
                    break
        return min((one for one in ranks.gather(own) if one is not None), default=(0, ""))[1]

    def _find_fault(self, group: int, check: Callable[[list[Sample]], None]) -> str:
        try:
            check(self[group])
        except SampleError as error:
            return str(error)
        return ""

    def __len__(self) -> int:
        """Number of records, those without samples included; or of groups."""
        return len(self.sizes)

    @overload
    def __getitem__(self, place: int) -> list[Sample]: ...
    @overload
    def __getitem__(self, place: slice) -> list[list[Sample]]: ...
    def __getitem__(self, place: int | slice) -> list[Sample] | list[list[Sample]]:
        """Return the samples of a record, or of a group; raises SampleError if its file has changed."""
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        place = range(len(self))[place]  # negative ones count from the end
        if self._members is None:
            return self._read(place)
        records = self._members[slice(*self._begins[place : place + 2].tolist())].tolist()
        return [sample for record in records for sample in self._read(record)]

    def _read(self, number: int) -> list[Sample]:
        record = self._index.read(number)
        samples = samples_of_record(record, self._options, Skipped() if self._skips else None)
        if len(samples) != self._record_sizes[number]:
            raise SampleError(
                f"{record.source}: gives {len(samples)} samples, but it gave {self._record_sizes[number]} when the "
                "run began; do not change the files while it runs"
            )
        return samples


@dataclass(kw_only=True, eq=False)
class _Found:
    """Findings of one rank in its N records.

    Attributes:
        sizes: int32 ``[N]``, samples of each record.
        digests: uint64 ``[N, 2]``, digest of each record's key.
        failure: error that ended the pass, or "".
        fault: first error of ``check`` among neighbouring records with the same key, the first at ``fault_at``, or "".
        goes_on: bool ``[N]``, whether a record's first sample is a later turn of the rollout of the sample before it.
        first_place: place of the first record that has samples; -1 without any.
        first_turn, last_turn: rollout and turn of the first and the last sample; None unless it names both.
    """

    sizes: npt.NDArray[np.int32]
    digests: Digests
    left_out: Skipped = field(default_factory=Skipped)
    seen: set[str] = field(default_factory=set)
    failure: str = ""
    fault: str = ""
    fault_at: int = 0
    is_scored: bool = False
    goes_on: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    first_place: int = -1
    first_turn: Turn | None = None
    last_turn: Turn | None = None

    def add_turns(self, place: int, first: Turn | None, last: Turn | None) -> None:
        """Take the turns of the first and the last sample of the next record that has samples."""
        if self.first_place < 0:
            self.first_turn, self.first_place = first, place
        self.goes_on[place] = goes_on(self.last_turn, first)
        self.last_turn = last


def _go_through(
    index: FileIndex,
    records: range,
    options: LineOptions,
    *,
    skips: bool,
    progress: Callable[[int, int], None] | None,
    key: Callable[[Sample], Hashable] | None,
    check: Callable[[list[Sample]], None] | None,
) -> _Found:
    keyed = 0 if key is None else len(records)
    found = _Found(
        sizes=np.zeros(len(records), np.int32),
        digests=np.zeros((keyed, 2), np.uint64),
        goes_on=np.zeros(len(records), np.bool_),
    )
    groups = _CheckedGroups(check, keyed=key is not None)
    try:
        for place, record in enumerate(_reporting(index, records, progress)):
            bad = found.left_out if skips else None
            samples = samples_of_record(index.read(record), options, bad, found.seen, found.left_out)
            found.sizes[place] = len(samples)
            if not samples:
                continue
            found.add_turns(place, read_turn(samples[0]), read_turn(samples[-1]))
            found.is_scored = found.is_scored or any(sample.is_scored for sample in samples)
            digest = None if key is None else _digest(_read_key(samples, key), record)
            if digest is not None:
                found.digests[place] = np.frombuffer(digest, dtype=np.uint64)
            groups.add(samples, digest, record)
    except SampleError as error:
        found.failure = str(error)
    if key is None:
        groups.end()
    found.fault, found.fault_at = groups.fault, groups.fault_at
    return found


def _raise_failure(
    everyone: Sequence[_Found], paths: Sequence[str], options: LineOptions, skipped: Skipped | None
) -> None:
    """Count the skipped samples of all ranks; raise a rank's failure, or SampleError for no samples or a lost name."""
    left_out = Skipped()
    for found in everyone:
        if found.failure:
            raise SampleError(found.failure)
        left_out.merge(found.left_out)
    if not any(found.sizes.any() for found in everyone):
        raise no_samples(paths, left_out)
    options.names.check_seen(set().union(*(found.seen for found in everyone)), paths)
    if skipped is not None:
        skipped.merge(left_out)


def _read_key(samples: Sequence[Sample], key: Callable[[Sample], Hashable]) -> Hashable:
    """Return the key of a record; raises SampleError if it holds parts of several groups, which are read together."""
    keys = {key(sample) for sample in samples}
    if len(keys) > 1 or (None in keys and len(samples) > 1):
        raise SampleError(
            f"{samples[0].source}: its record holds several rollouts, which streaming reads together and a step would "
            "take apart; write a record for each, or hold all samples in memory (data.streaming=false)"
        )
    return keys.pop()


def _reporting(index: FileIndex, records: range, progress: Callable[[int, int], None] | None) -> Iterator[int]:
    """Yield the records; report the bytes before every so many of them."""
    told = begin = index.bytes_before(records.start)
    end = index.bytes_before(records.stop)
    for record in records:
        yield record
        now = index.bytes_before(record)
        if progress is not None and now - told >= _PROGRESS_BYTES:
            told = now
            progress(now - begin, end - begin)


class _CheckedGroups:
    """Neighbouring records with the same key, checked after the last one; the first and last group may span ranks."""

    def __init__(self, check: Callable[[list[Sample]], None] | None, *, keyed: bool) -> None:
        self.fault, self.fault_at = "", 0
        self._check, self._keyed = check, keyed
        self._samples: list[Sample] | None = None
        self._digest: bytes | None = None
        self._first = 0

    def add(self, samples: list[Sample], digest: bytes | None, record: int) -> None:
        """Take the samples of one record, which continue a group if their digest is that of the record before."""
        if digest is None or digest != self._digest:
            self.end()
            self._samples = None if self._keyed and self._digest is None else []
            self._first = record
        if self._samples is not None:
            self._samples += samples
        self._digest = digest

    def end(self) -> None:
        """Check the group that is open."""
        if not self.fault:
            self.fault, self.fault_at = _fault(self._samples, self._check), self._first


def _fault(samples: list[Sample] | None, check: Callable[[list[Sample]], None] | None) -> str:
    """Return the error that ``check`` raises, or "" if it raises none or nothing is to be checked."""
    if not samples or check is None:
        return ""
    try:
        check(samples)
    except SampleError as error:
        return str(error)
    return ""


def _digest(key: Hashable, record: int) -> bytes:
    """Return 16 bytes, the same in every process; keys that differ, and records without a key, have different ones."""
    told = f"record {record}" if key is None else repr(_as_compared(key))
    return blake2b(told.encode(), digest_size=16).digest()


def _as_compared(key: Hashable) -> Hashable:
    """Return one of 1, 1.0 and True for all three, which are equal to Python, also within a tuple."""
    if isinstance(key, tuple):
        return tuple(map(_as_compared, key))
    return int(key) if isinstance(key, bool) or (isinstance(key, float) and key.is_integer()) else key
