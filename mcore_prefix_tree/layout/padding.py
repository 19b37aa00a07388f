"""Padding of a micro-batch to a multiple that its parallel layout needs, and to few sizes if wanted."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Sizes that micro-batches are rounded up to; construction raises ValueError for invalid buckets.

    Attributes:
        multiple: divisor of the size: the number of tensor-parallel ranks if they share the sequence, else 1.
        buckets: the only sizes, increasing multiples, if something downstream is compiled or captured once per size.
            Empty rounds up to ``multiple`` and no further.
    """

    multiple: int = 1
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"the multiple of a padded size, {self.multiple}, must be at least 1")
        for bucket in self.buckets:
            if bucket < 1:
                raise ValueError(f"a size of {bucket} is too small; sizes are at least 1")
            if bucket % self.multiple:
                raise ValueError(f"{bucket} is not a multiple of {self.multiple}, which the parallel layout needs")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{list(self.buckets)} must increase")

    def check_holds(self, max_tokens: int) -> None:
        """Raise ValueError if the largest bucket is below ``max_tokens``."""
        if self.buckets and self.buckets[-1] < max_tokens:
            raise ValueError(
                f"the largest, {self.buckets[-1]}, cannot hold a micro-batch of {max_tokens} tokens; add one that can"
            )

    def size(self, tokens: int) -> int:
        """Return the size with padding, at least one token; raise ValueError if ``tokens`` exceed all buckets."""
        if not self.buckets:
            return max(1, -(-tokens // self.multiple)) * self.multiple
        self.check_holds(tokens)
        return self.buckets[bisect_left(self.buckets, tokens)]


NO_PADDING = Padding()
