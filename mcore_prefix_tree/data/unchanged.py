"""Whether a file that is read again and again is still the one that was indexed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mcore_prefix_tree.sample import SampleError


@dataclass(frozen=True)
class Unchanged:
    """A file as it is while it is indexed, which its content is held to later.

    Attributes:
        path: of the file.
        size: its bytes.
        mtime_ns: when it was last written to.
    """

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def since_now(cls, path: str) -> Unchanged:
        """Take note of a file, before its content is looked at.

        Raises:
            OSError: there is no such file any more.
        """
        now = os.stat(path)
        return cls(path, now.st_size, now.st_mtime_ns)

    def check(self, descriptor: int | None = None) -> None:
        """See that it is the same; with every read, which costs far more than asking.

        Args:
            descriptor: of the file, where it is open; the path may name another one by now.

        Raises:
            SampleError: it has been written to, or is another one.
            OSError: there is none any more.
        """
        now = os.stat(self.path if descriptor is None else descriptor)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise self.error()

    def error(self) -> SampleError:
        """Of a file that is not the same."""
        return SampleError(f"{self.path}: has changed since the run began; leave the files alone while it runs")
