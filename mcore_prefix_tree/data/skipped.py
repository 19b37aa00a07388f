"""Counts of skipped samples: bad ones, and those that their records exclude."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from mcore_prefix_tree.utils.choices import OnError

Kind = Literal["unreadable", "malformed", "too long", "outside the vocabulary"]

_NAMED = 10


@dataclass
class Skipped:
    """Skipped samples: those that a record excludes, and with ``on_error="skip"`` bad ones.

    Attributes:
        count: number of bad ones: lines that cannot be read, and samples that are too long. A conversation that cannot
            be encoded counts once, regardless of its turns.
        kinds: number for each reason. An ``"unreadable"`` line is not a record; the fields of a ``"malformed"`` record
            give no samples.
        first: reasons of the first few; each names file, line and field.
        excluded: number of records, or completions of a record, whose field ``exclude`` is true.
    """

    count: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    excluded: int = 0

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
