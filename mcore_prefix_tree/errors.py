"""The last words of a process that a user's mistake ends: one sentence, said by one rank of a machine."""

from __future__ import annotations

import os
import sys
import time

USER_ERROR = 2

# What this package raises for users. An ImportError says which optional package is missing and how to get it.
USER_ERRORS = (ValueError, OSError, NotImplementedError, ImportError)
_PATIENCE_S = 10.0


def sentence_of(error: BaseException) -> str:
    """An error of :data:`USER_ERRORS` in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def tell(sentence: str | None) -> None:
    """Say why this process is about to exit: under torchrun, the first rank of a machine for all that met the same.

    torchrun ends every rank as soon as one exits, so the others wait for that. Where it does not come, what happened is
    theirs alone, and they say it themselves.

    Args:
        sentence: None where everything is said already.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_PATIENCE_S)
    if sentence is not None:
        sys.stderr.write(f"error: {sentence}\n")
        sys.stderr.flush()
