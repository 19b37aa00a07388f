"""Errors on the terminal: one sentence and an exit code for a mistake of the user, a traceback for a bug."""

from __future__ import annotations

import codecs
import io
import logging
import signal
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from mcore_prefix_tree.utils.errors import USER_ERROR, exit_with, readable_errors
from mcore_prefix_tree.utils.gone import explain_gone

# Errors that Typer raises for wrong arguments, of Click or of its copy of Click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Warnings below an error: that GPTModel will give way to HybridModel, and that nvcc is installed and a GPU is not.
_CHATTY_LOGGERS = ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension", "megatron.bridge")


def quiet_upstream() -> None:
    """Hide megatron-core's warnings, repeated on every rank, of optional packages and torch's names of its calls."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Megatron reads the part that all ranks share in each rank, and gives torch its arguments in an older order.
    for message in ("torch.distributed is disabled, unavailable", "The argument order of load has been changed"):
        warnings.filterwarnings("ignore", message, UserWarning, module=r"torch\.distributed\.checkpoint")
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Return a substitute for characters that an encoding lacks (``...`` for an ellipsis), or a question mark."""
    assert isinstance(error, UnicodeEncodeError), "called only for output"
    parts = unicodedata.normalize("NFKD", error.object[error.start : error.end])
    plain = "".join(part for part in parts if not unicodedata.combining(part))
    return plain.encode("ascii", "replace").decode("ascii"), error.end


class Commands(TyperGroup):
    """A group whose every command runs inside :func:`readable_errors`."""

    def main(self, *args: Any, **options: Any) -> Any:
        # Standard output takes any character: its encoding is the terminal's, the text is the data's.
        codecs.register_error("mcore_prefix_tree.plainer", _plainer)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="mcore_prefix_tree.plainer")
        return super().main(*args, **options)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments before the command's name; ``--help`` is shown here."""
        with _one_sentence():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name; Ctrl-C raises in it, so that it cleans up."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with readable_errors(), _one_sentence():
            return super().invoke(ctx)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Replace the box that Typer draws around errors in arguments."""
    try:
        yield
    except _UsageError as error:
        context, message = error.ctx, error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: with Rich its help is printed
            typer.echo(message, nl=bool(message))
            raise SystemExit(USER_ERROR) from None
        # An option of the program itself fails before there is a context.
        program = "mcore-prefix-tree" if context is None else context.command_path
        # "No such command 'attention'." of "bench", or "No such option: --calibration".
        asked = f"{program.removeprefix('mcore-prefix-tree ')} {message.rstrip('.').rpartition(' ')[2].strip(chr(39))}"
        exit_with(USER_ERROR, explain_gone(asked) or f"{message.rstrip('.')}; see {program} --help")
