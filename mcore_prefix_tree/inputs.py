"""Open files that users name, and end with a sentence where a file never ends or never begins."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import BinaryIO

PathLike = str | os.PathLike[str]

FIFO_S = 10.0
TEXT_BYTES = 1 << 24
MOST = 2**31 - 1  # of tokens, which are counted in int32, and of whatever else is counted


def open_input(path: PathLike) -> BinaryIO:
    """Open a file for reading; raises OSError for a FIFO that no process writes to."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return open(path, "rb")
    # Opening a FIFO waits for a writer; only a thread can wait for a limited time and lose nothing that is written.
    opened: list[BinaryIO] = []
    waiting = threading.Thread(target=lambda: opened.append(Path(path).open("rb")), daemon=True)  # noqa: SIM115
    waiting.start()
    waiting.join(FIFO_S)
    if not opened:
        why = f"no process has opened this FIFO to write to it within {FIFO_S:g} s; start its writer first"
        raise TimeoutError(errno.ETIMEDOUT, why, os.fspath(path))
    return opened[0]


def read_text(path: PathLike) -> str:
    """Return the content of a small file in UTF-8, such as a recipe.

    Raises:
        OSError: see :func:`open_input`.
        ValueError: the file is not UTF-8, or larger than :data:`TEXT_BYTES`.
    """
    with open_input(path) as stream:
        content = stream.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise ValueError(f"{os.fspath(path)}: is larger than {TEXT_BYTES >> 20} MiB")
    return content.decode("utf-8-sig")


def check_regular(path: PathLike) -> None:
    """Raise OSError unless a path names a regular file, which can be read from any place in it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.ESPIPE, "is not a regular file, and cannot be read from the middle", os.fspath(path))


def is_same_file(one: PathLike, other: PathLike) -> bool:
    """Return whether two paths name one existing file."""
    return Path(one).exists() and Path(other).exists() and os.path.samefile(one, other)
