"""Counts of bad samples that were left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from mcore_prefix_tree.choices import OnError

Kind = Literal["unreadable", "malformed", "too long", "outside the vocabulary"]

_NAMED = 10


@dataclass
class Skipped:
    """Samples that ``on_error="skip"`` left out: lines that cannot be read, and samples that are too long.

    Attributes:
        count: number of them. A conversation that cannot be encoded counts once, however many turns it has.
        kinds: number for each reason. An ``"unreadable"`` line is not a record; the fields of a ``"malformed"`` record
            give no samples.
        first: reasons of the first few; each names file, line and field.
    """

    count: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def add(self, error: Exception, kind: Kind) -> None:
        """Count one."""
        self.merge(Skipped(count=1, kinds=Counter([kind]), first=[str(error)]))

    def merge(self, other: Skipped) -> None:
        """Add the counts of data that comes after this."""
        self.count += other.count
        self.kinds += other.kinds
        self.first = (self.first + other.first)[:_NAMED]

    def __str__(self) -> str:
        """One line."""
        more = self.count - len(self.first)
        reasons = [*self.first, f"and {more} more"] if more else self.first
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        return f"skipped {self.count} bad sample{'' if self.count == 1 else 's'} ({kinds}): {' | '.join(reasons)}"


def check_on_error(on_error: str) -> None:
    """Raise ValueError unless ``on_error`` is one of the choices."""
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error={on_error!r} must be one of {', '.join(map(repr, get_args(OnError)))}")
