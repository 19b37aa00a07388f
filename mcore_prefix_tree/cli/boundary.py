"""Where errors meet the terminal: one sentence and an exit code for what a user can mend, a traceback for a bug."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from mcore_prefix_tree.errors import USER_ERROR, USER_ERRORS, sentence_of, tell

FAILED = 1
INTERRUPTED = 130

# What they say below an error: that GPTModel will give way to HybridModel, that nvcc is there and a GPU is not.
_CHATTY_LOGGERS = ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension")


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
    except USER_ERRORS as error:
        leave(USER_ERROR, sentence_of(error))


def leave(code: int, sentence: str | None = None) -> NoReturn:
    """Exit, and :func:`tell` why."""
    tell(sentence)
    raise typer.Exit(code)


def quiet_upstream() -> None:
    """Spare the terminal what megatron-core warns of on every rank: optional packages, torch's names of its calls."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


class Commands(TyperGroup):
    """A group whose every command runs inside :func:`readable_errors`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with readable_errors():
            return super().invoke(ctx)
