"""Where errors meet the terminal: one sentence and an exit code for what a user can mend, a traceback for a bug."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130

# What this package raises for users. An ImportError says which optional package is missing and how to get it.
_USER_ERRORS = (ValueError, OSError, NotImplementedError, ImportError)
_PATIENCE_S = 10.0


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors that a user can mend into one line on standard error and exit code 2.

    Ctrl-C exits with 130, quietly. A reader that has gone away is Typer's to handle: it exits with 1, quietly. Anything
    else is a bug of ours and keeps its traceback.
    """
    try:
        yield
        sys.stdout.flush()  # a reader that has gone away is noticed here rather than at the interpreter's exit
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except _USER_ERRORS as error:
        leave(USER_ERROR, _sentence(error))


def leave(code: int, sentence: str | None = None) -> NoReturn:
    """Exit, saying why on standard error: under torchrun, the first rank of a machine for all that met the same.

    torchrun ends every rank as soon as one exits, so the others wait for that. Where it does not come, what happened is
    theirs alone, and they say it themselves.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_PATIENCE_S)
    if sentence is not None:
        typer.echo(f"error: {sentence}", err=True)
    raise typer.Exit(code)


def quiet_upstream() -> None:
    """Spare the terminal what megatron-core warns of on every rank: optional packages, torch's names of its calls."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


class Commands(TyperGroup):
    """A group whose every command runs inside :func:`readable_errors`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with readable_errors():
            return super().invoke(ctx)
