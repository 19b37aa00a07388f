"""Standard output and standard error that may be lost while a command runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from mcore_prefix_tree.utils.errors import ENDED_BY_SIGNAL


def _end(error: OSError) -> None:
    """End the command as Unix tools end without their output."""
    if isinstance(error, BrokenPipeError):
        raise SystemExit(ENDED_BY_SIGNAL + signal.SIGPIPE) from None
    raise OSError(error.errno, error.strerror, "standard output") from None


def _go_on(error: OSError) -> None:
    print(f"standard output is lost ({error.strerror}); the run continues without it", file=sys.stderr)


def _ignore(error: OSError) -> None:
    """Do nothing: there is nowhere left to report it."""


class LostOutput:
    """A stream that calls ``when_lost`` if its reader goes away, its terminal closes or its device is full."""

    def __init__(self, stream: TextIO, when_lost: Callable[[OSError], None]) -> None:
        self._stream, self.when_lost = stream, when_lost
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        with self._may_be_lost():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        with self._may_be_lost():
            self._stream.flush()

    @contextmanager
    def _may_be_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.is_lost = True
            # Otherwise the interpreter tries again to write the buffer when it ends, and reports that.
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            self.when_lost(error)


@contextmanager
def lost_output() -> Iterator[None]:
    """End a command quietly if its standard output is lost, in a ``with`` block; continue without standard error."""
    before = sys.stdout, sys.stderr
    # A descriptor that the caller closed would be given to the next file, and be written to.
    out, err = (stream or open(os.devnull, "w") for stream in before)  # noqa: SIM115
    stdout = LostOutput(out, _end)
    sys.stdout, sys.stderr = cast("TextIO", stdout), cast("TextIO", LostOutput(err, _ignore))
    try:
        yield
    finally:
        stdout.when_lost = _ignore
        stdout.flush()
        sys.stdout, sys.stderr = before


def outlive_output() -> None:
    """Let the rest of the command continue if standard output is lost, and report that on standard error."""
    if isinstance(sys.stdout, LostOutput):
        sys.stdout.when_lost = _go_on
