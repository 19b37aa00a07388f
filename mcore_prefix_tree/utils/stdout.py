"""Standard output that may be lost while a job trains."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class _Outlived:
    """A stream whose lines are dropped once its terminal, its reader or its disk is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def outlive_output() -> None:
    """Let a job save and go on without its output: a terminal that sends SIGHUP takes no more lines."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, cast("TextIO", _Outlived(stream)))
