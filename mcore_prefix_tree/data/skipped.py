"""Counts of what is not read: bad samples, those that their records exclude, and fields."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from mcore_prefix_tree.data.formats import FIELDS
from mcore_prefix_tree.utils.choices import OnError

Kind = Literal["unreadable", "malformed", "too long", "outside the vocabulary"]

_NAMED = 10
_FIELDS = 40


@dataclass
class Skipped:
    """Skipped samples: those that a record excludes, and with ``on_error="skip"`` bad ones."""

    # Number of bad ones: lines that cannot be read, and samples that are too long. A conversation that cannot be
    # encoded counts once, regardless of its turns.
    count: int = 0
    # Number for each reason. An ``"unreadable"`` line is not a record; the fields of a ``"malformed"`` record give no
    # samples.
    kinds: Counter[Kind] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)  # reasons of the first few; each names file, line and field
    excluded: int = 0  # number of records, or completions of a record, whose field ``exclude`` is true
    records: int = field(default=0, compare=False)  # number of records that were read
    unread: Counter[str] = field(default_factory=Counter)  # number of them that have each field which is not read

    def __bool__(self) -> bool:
        """Return whether anything was skipped."""
        return bool(self.count or self.excluded)

    def add(self, error: Exception, kind: Kind) -> None:
        """Count one."""
        self.merge(Skipped(count=1, kinds=Counter([kind]), first=[str(error)]))

    def merge(self, other: Skipped) -> None:
        """Add the counts of data that comes after this."""
        self.count += other.count
        self.kinds += other.kinds
        self.first = (self.first + other.first)[:_NAMED]
        self.excluded += other.excluded
        self.records += other.records
        self.unread += other.unread

    def note(self, unread: Iterable[str]) -> None:
        """Count a record that was read, and its fields that were not."""
        self.records += 1
        self.unread.update(unread)

    @property
    def not_read(self) -> str:
        """A line about the fields that are not read, with the name that may be meant; "" without any."""
        told: list[str] = []
        for name, count in sorted(self.unread.items(), key=lambda one: (-one[1], one[0])):
            meant = [] if name in FIELDS else difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
            many = f"{count} of {self.records} records" if not told else str(count)
            shown = name.encode(errors="backslashreplace").decode()  # JSON may have half of a surrogate pair
            told.append(f"{shown} ({many}{f'; is {meant[0]} meant?' if meant else ''})")
        more = len(told) - _FIELDS
        return f"not read: {', '.join(told[:_FIELDS])}{f' and {more} more' if more > 0 else ''}" if told else ""

    def __str__(self) -> str:
        """One line."""
        excluded = f"excluded {self.excluded} by the field 'exclude'" if self.excluded else ""
        if not self.count:
            return excluded
        more = self.count - len(self.first)
        reasons = [*self.first, f"and {more} more"] if more else self.first
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        bad = f"skipped {self.count} bad sample{'' if self.count == 1 else 's'} ({kinds}): {' | '.join(reasons)}"
        return f"{excluded}; {bad}" if excluded else bad


def check_on_error(on_error: str) -> None:
    """Raise ValueError unless ``on_error`` is one of the choices."""
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error={on_error!r} must be one of {', '.join(map(repr, get_args(OnError)))}")
