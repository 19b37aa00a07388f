"""Records of files larger than memory: an index of their places, and samples made when they are requested.

Memory is 12 bytes per line, or 4 bytes per row and the most recent chunks of tables; units of several records take
another 12 bytes each. One pass at the start, shared by the ranks of a job, finds every bad record before training
begins, counts the samples of each record, and joins neighbouring records to units.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import overload

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.files import FileIndex, PathLike, no_samples, resolve_paths
from mcore_prefix_tree.data.fingerprint import check_same_files
from mcore_prefix_tree.data.grouping import check_sizes, is_later_turn, unit_of
from mcore_prefix_tree.data.records import LineOptions, samples_of_record
from mcore_prefix_tree.data.skipped import Skipped, check_on_error
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import GroupedBy
from mcore_prefix_tree.utils.choices import OnError
from mcore_prefix_tree.utils.ranks import ALONE, Ranks

_PROGRESS_BYTES = 1 << 24


class StreamedGroups(Sequence[list[Sample]]):
    """The samples of each unit of the files, read and encoded when requested; bad samples were skipped at the start.

    A unit is one record, or several neighbouring records of one group. The object can be pickled and read from any
    number of processes.

    Args:
        paths: files as :func:`mcore_prefix_tree.data.iter_sample_groups` takes them, without packed files and standard
            input.
        skipped: counter of skipped samples, the same on every rank.
        ranks: ranks that share the first pass.
        progress: function called with the bytes done and all bytes of this rank's part.
        check: function called with the samples of each unit; it may raise SampleError.
        grouped_by: kind of unit whose records are joined; they have to lie together. None for single records.
        step: number of samples per step, if steps count samples; see :func:`whole_groups`.
        setting: setting that needs the ids of units, for messages.
        joins_turns: whether, without ``grouped_by``, neighbouring records that hold one turn after another of a rollout
            are a unit.

    Attributes:
        sizes: int32 ``[len(self)]``, number of samples of each unit.

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
        check: Callable[[list[Sample]], None] | None = None,
        grouped_by: GroupedBy | None = None,
        step: int | None = None,
        setting: str = "",
        joins_turns: bool = False,
    ) -> None:
        check_on_error(on_error)
        resolved = resolve_paths(paths)
        self._options, self._skips = options, on_error == "skip"
        self._by, self._setting, self._joins_turns = grouped_by, setting, joins_turns
        self._index = index = FileIndex(resolved, options.names)
        check_same_files(
            len(index), resolved, lambda record: samples_of_record(index.read(record), options, Skipped()), ranks
        )

        # Each rank goes through its part of the records. The first failure in the order of the files is everyone's.
        everyone: list[_Part] = ranks.gather(self._go_through(ranks, check, progress))
        left_out = Skipped()
        for part in everyone:
            if part.failure:
                raise SampleError(part.failure)
            left_out.merge(part.left_out)
        self._record_sizes = np.concatenate([np.array(part.sizes, np.int32) for part in everyone])
        if not self._record_sizes.any():
            raise no_samples(resolved, left_out)
        options.names.check_seen(set().union(*(part.seen for part in everyone)), resolved)
        if skipped is not None:
            skipped.merge(left_out)

        # The records before which a unit begins, and their end; None if each record is a unit.
        self._begins: npt.NDArray[np.int64] | None = None
        self.sizes = self._record_sizes
        starts = np.concatenate([np.array(part.begins, np.int64) for part in everyone])
        if grouped_by is not None or len(starts) < np.count_nonzero(self._record_sizes):
            self._begins = np.append(starts, len(index))
            self.sizes = np.add.reduceat(self._record_sizes, starts).astype(np.int32)
        if grouped_by is not None:
            self._check_together(np.frombuffer(b"".join(part.keys for part in everyone), np.uint64).reshape(-1, 2))
            check_sizes(self, self.sizes, grouped_by, step)
        fault = next((part.fault for part in everyone if part.fault), "")
        if fault:
            raise SampleError(fault)

    def _go_through(
        self, ranks: Ranks, check: Callable[[list[Sample]], None] | None, progress: Callable[[int, int], None] | None
    ) -> _Part:
        """Go through the units that begin in this rank's records; the last may end in the next rank's."""
        records, size = self._index.part(ranks.rank, ranks.size)
        part = _Part()
        unit: list[Sample] = []
        told = 0
        try:
            last = self._last_before(records.start)
            for number in range(records.start, len(self._index)):
                # It may belong to another rank only at the ends; merging counts takes a twentieth of a record's time.
                left_out = part.left_out if part.begins and number < records.stop else Skipped()
                record = self._index.read(number)
                samples = samples_of_record(
                    record, self._options, left_out if self._skips else None, part.seen, left_out
                )
                if samples:
                    goes_on, key = self._follows(last, samples, number)
                    last = samples[-1]
                    if not goes_on:
                        part.check(unit, check)
                        if number >= records.stop:
                            break
                        unit = []
                        part.begins.append(number)
                        part.keys += key
                if ranks.rank and not part.begins:
                    continue  # it belongs to a unit of the rank before
                unit += samples
                part.sizes.append(len(samples))
                if left_out is not part.left_out:
                    part.left_out.merge(left_out)
                done = min(size, size * (number - records.start) // max(len(records), 1))
                if progress is not None and done - told >= _PROGRESS_BYTES:
                    told = done
                    progress(done, size)
            else:
                part.check(unit, check)
        except SampleError as error:
            part.failure = str(error)
        return part

    def _last_before(self, record: int) -> Sample | None:
        """Return the last sample before a record, which the record's samples may go on from."""
        if self._by is not None or self._joins_turns:
            for number in range(record - 1, -1, -1):
                if samples := samples_of_record(self._index.read(number), self._options, Skipped()):
                    return samples[-1]
        return None

    def _follows(self, last: Sample | None, samples: Sequence[Sample], record: int) -> tuple[bool, bytes]:
        """Return whether a record's samples belong to the unit of the sample before them, and a digest of its id."""
        if self._by is None:
            return self._joins_turns and last is not None and is_later_turn(last, samples[0]), b""
        ids = {unit_of(sample, self._by, self._setting) for sample in samples}
        if len(ids) > 1 or (None in ids and len(samples) > 1):
            raise SampleError(
                f"{samples[0].source}: its record holds several rollouts, which streaming reads together and a step "
                "would take apart; write a record for each, or hold all samples in memory (data.streaming=false)"
            )
        key = ids.pop()
        if key is not None and last is not None and unit_of(last, self._by, self._setting) == key:
            return True, b""
        # 16 bytes that are the same in every process, for equal numbers too, and differ for records without an id.
        ids_of_key = key if isinstance(key, tuple) else (f"record {record}" if key is None else key,)
        compared = [Fraction(one) if isinstance(one, (int, float)) else one for one in ids_of_key]
        return False, blake2b(repr(compared).encode(), digest_size=16).digest()

    def _check_together(self, keys: npt.NDArray[np.uint64]) -> None:
        """Check that no two units have the same key; the keys are uint64 ``[len(self), 2]``."""
        order = np.lexsort(keys.T)  # stable: equal keys stay in the order of the files
        (same,) = np.nonzero((keys[order[1:]] == keys[order[:-1]]).all(axis=1))
        if len(same):
            at = int(same[np.argmin(order[same + 1])])
            first, again = self[int(order[at])][0], self[int(order[at + 1])][0]
            raise SampleError(
                f"{again.source}: {self._by} {getattr(again.signals, str(self._by))!r} is at {first.source} too, with "
                f"other lines between; streaming reads a {self._by} from one place: give each its own id, put its "
                "lines next to each other, or hold all samples in memory (data.streaming=false)"
            )

    def __len__(self) -> int:
        """Number of units; without ``grouped_by`` and joined turns, of records, those without samples included."""
        return len(self.sizes)

    @overload
    def __getitem__(self, place: int) -> list[Sample]: ...
    @overload
    def __getitem__(self, place: slice) -> list[list[Sample]]: ...
    def __getitem__(self, place: int | slice) -> list[Sample] | list[list[Sample]]:
        """Return the samples of a unit; raises SampleError if its file has changed."""
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        place = range(len(self))[place]  # negative ones count from the end
        first, end = (place, place + 1) if self._begins is None else self._begins[place : place + 2].tolist()
        records = first + np.flatnonzero(self._record_sizes[first:end])
        return [sample for record in records.tolist() for sample in self._read(record)]

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
class _Part:
    """Findings of one rank in the records of its units."""

    sizes: array[int] = field(default_factory=lambda: array("i"))  # samples of each record
    begins: array[int] = field(default_factory=lambda: array("q"))  # record that each unit begins with
    keys: bytearray = field(default_factory=bytearray)  # 16 bytes of digest of each unit's id
    left_out: Skipped = field(default_factory=Skipped)
    seen: set[str] = field(default_factory=set)
    failure: str = ""  # first error of the records, which ended the pass
    fault: str = ""  # first error of ``check``

    def check(self, unit: list[Sample], check: Callable[[list[Sample]], None] | None) -> None:
        """Check a complete unit, unless there was a fault before."""
        if unit and check is not None and not self.fault:
            try:
                check(unit)
            except SampleError as error:
                self.fault = str(error)
