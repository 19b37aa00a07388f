"""Exit with one sentence, from one rank of a machine, and exit code 2 after a user's mistake."""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

FAILED = 1
USER_ERROR = 2
ENDED_BY_SIGNAL = 128  # and the signal's number, as shells have it
INTERRUPTED = ENDED_BY_SIGNAL + signal.SIGINT

# Errors that this package raises for users. An ImportError names the missing optional package and its installation.
USER_ERRORS = (ValueError, OSError, NotImplementedError, ImportError, MemoryError)
# How long a rank waits to be ended before it reports what another has reported, under torchrun and elsewhere. A loaded
# machine takes seconds to end the rank that reported.
_PATIENCE_S, _PATIENCE_ELSEWHERE_S = 30.0, 10.0
# Messages of torch, CUDA and C++ that correspond to Python's MemoryError, and the size that they and NumPy requested.
_NO_MEMORY = re.compile(
    r"can't allocate memory|out of memory|not enough memory|bad_alloc|ALLOC_FAILED|new thread|"
    + re.escape(os.strerror(errno.EAGAIN))  # of a thread that cannot start
)
_NO_FILES = os.strerror(errno.EMFILE)
_ASKED_FOR = re.compile(r"(?:tried|Tried|Unable) to allocate ([0-9.]+) (\w+)")


class OutOfMemoryError(MemoryError):
    """Memory ran out. The message names the work that needed it, and the setting that needs less."""


@contextmanager
def readable_errors(is_users: Callable[[BaseException], bool] = lambda error: True) -> Iterator[None]:
    """Turn errors that a user can fix into one line on standard error and exit code 2.

    Ctrl-C exits with 130, and a closed pipe with 1, quietly. Anything else is a bug and keeps its traceback.
    ``is_users`` decides whether a user can fix an error of :data:`USER_ERRORS`.
    """
    try:
        yield
        print(end="", flush=True)  # a reader that has gone away is noticed here rather than at the interpreter's exit
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (*USER_ERRORS, RuntimeError) as error:
        if isinstance(error, BrokenPipeError) and _is_output_broken():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter writes the rest at its exit
            raise SystemExit(FAILED) from None  # as Rich and Click do
        is_known = isinstance(error, USER_ERRORS) or is_out_of_memory(error) or _NO_FILES in str(error)
        if not (is_known and is_users(error)):
            raise
        exit_with(USER_ERROR, format_error(error))


def _is_output_broken() -> bool:
    """Return whether the reader of standard output, for example ``head``, has gone away."""
    output = select.poll()
    output.register(1, 0)
    return bool(output.poll(0))


class Mistakes:
    """Errors of several checks, reported together: a user mends all of them before the next start."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def check(self, check: Callable[..., Any], *args: Any, **options: Any) -> bool:
        """Run a check, keep the error that it raises for a user, and return whether it raised none."""
        try:
            check(*args, **options)
        except USER_ERRORS as error:
            self.note(error)
            return False
        return True

    def note(self, error: Exception) -> None:
        """Keep an error."""
        self._errors.append(error)

    def __bool__(self) -> bool:
        return bool(self._errors)

    @property
    def sentences(self) -> list[str]:
        """Return each error in one line, once."""
        return list(dict.fromkeys(map(format_error, self._errors)))

    def report(self) -> None:
        """Raise the collected error, or ValueError with several in one sentence."""
        sentences = self.sentences
        if len(sentences) == 1:
            raise self._errors[0]
        if sentences:
            raise ValueError("; ".join(sentences))


@contextmanager
def spelled(spellings: Mapping[str, str]) -> Iterator[None]:
    """Show the settings that an error names in the spelling of a door, for example its flags; see :func:`spell`."""
    try:
        yield
    except USER_ERRORS as error:
        if len(error.args) == 1:  # others, for example the operating system's, name no setting
            error.args = (spell(str(error.args[0]), spellings),)
        raise


def spell(sentence: str, spellings: Mapping[str, str]) -> str:
    """Return a sentence with the settings that it names in the spelling of a door.

    Settings have their canonical keys, which are a recipe's; a key after "its" belongs to another recipe, and stays.
    ``spellings`` also takes keys with a value, for example ``fused_head=false``.
    """
    if not spellings:
        return sentence
    keys = "|".join(re.escape(key) for key in sorted(spellings, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?<!\bits )({keys})(?!\w)", lambda key: spellings[key[1]], sentence)


@contextmanager
def naming(setting: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Begin the sentence of a ValueError with the setting that it is about, and raise it as ``kind``."""
    try:
        yield
    except ValueError as error:
        raise kind(f"{setting}{error}") from None


@contextmanager
def naming_memory(describe: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemoryError for a failed allocation, with the activity and the way out from ``describe``."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{_no_memory(error)}: {describe()}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, of the host or of a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )


def _no_memory(error: BaseException) -> str:
    asked = _ASKED_FOR.search(str(error))
    if asked is None:
        return "memory ran out"
    amount = f"{int(asked[1]) / 2**30:.2f} GiB" if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
    return f"memory ran out, {amount} more were asked for"


def is_of_this_package(error: BaseException) -> bool:
    """Return whether this package raised an error: a sentence for users. Errors of others keep their traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = "" if trace is None else trace.tb_frame.f_globals.get("__package__") or ""
    return package.partition(".")[0] == "mcore_prefix_tree"


def exit_with(code: int, sentence: str | None = None) -> NoReturn:
    """Exit, and :func:`print_error` why."""
    print_error(sentence)
    raise SystemExit(code)


def format_error(error: BaseException) -> str:
    """Return an error of :data:`USER_ERRORS` in one line."""
    if _NO_FILES in str(error):  # gloo and torch raise a RuntimeError
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: this process may have {limit} (ulimit -n); raise that"
    if is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
        return f"{_no_memory(error)}; use a machine with more, or fewer processes"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename or repr('')}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def print_error(sentence: str | None) -> None:
    """Report why this process is about to exit, unless ``sentence`` is None: under torchrun, one rank per machine does.

    torchrun ends every rank as soon as one exits, so the others wait for that. A rank that is not ended had another
    error.
    """
    if not is_reporting_rank():
        # It waits to be ended, but a trainer's handler would only record the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE_S if os.environ.get("TORCHELASTIC_ERROR_FILE") else _PATIENCE_ELSEWHERE_S)
    if sentence is not None:
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def is_reporting_rank() -> bool:
    """Return whether this rank reports for its machine: the first in torchrun's folder, or local rank 0 without it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # empty where torchrun is to keep no logs
    if file:
        try:
            (Path(file).parent.parent / "told").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # the folder cannot be written: one rank still has to speak, and local rank 0 is always there
        else:
            return True
    return os.environ.get("LOCAL_RANK", "0") == "0"


# Terminals, torchrun, Slurm and other schedulers send these to all processes of a job, workers too, to end it.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def handled_signals() -> list[int]:
    """Return the ending signals that this process does not ignore; ``nohup`` has it ignore SIGHUP."""
    return [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def end_without_stacks() -> None:
    """Keep ending signals, for example torchrun's, from printing stacks, as ``megatron.training`` requests."""
    for number in ENDING_SIGNALS:
        faulthandler.unregister(number)
