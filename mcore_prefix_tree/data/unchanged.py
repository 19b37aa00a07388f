"""Checks that a file that is read again and again is still the one that was indexed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mcore_prefix_tree.sample import SampleError


@dataclass(frozen=True)
class Unchanged:
    """Size and time of the last change of a file, noted before it is indexed."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def since_now(cls, path: str) -> Unchanged:
        """Note a file's size and time; raises OSError if it does not exist any more."""
        now = os.stat(path)
        return cls(path, now.st_size, now.st_mtime_ns)

    def check(self, descriptor: int | None = None) -> None:
        """Raise SampleError if the file, by its open ``descriptor`` or its path, has changed, OSError if it is gone."""
        now = os.stat(self.path if descriptor is None else descriptor)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise self.error()

    def error(self) -> SampleError:
        """Return the error for a file that is not the same."""
        return SampleError(f"{self.path}: has changed since the run began; do not change the files while it runs")
