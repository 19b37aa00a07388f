"""Let one run at a time save to a folder: two would write each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_prefix_tree.mcore.checkpoints.checkpoint import SaveError
from mcore_prefix_tree.mcore.ranks import on_main_rank


def hold(descriptor: int) -> bool:
    """Lock an open file or folder for this process; return whether no other process holds it.

    The operating system drops the lock when the process ends, also if it is killed. Network file systems without such
    locks let every run in.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # ENOLCK, ENOSYS, or from NFS EBADF for a folder: the run continues without this protection
    return True


@contextmanager
def exclusive_save(folder: str | Path) -> Iterator[None]:
    """Lock a folder for the length of a ``with`` block; if another run has it, every rank raises SaveError."""
    held: list[int] = []

    def claim() -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        held.append(descriptor)
        if not hold(descriptor):
            raise SaveError(
                f"checkpoint.save={folder}: another run is saving there at this moment; wait for its end or choose "
                "another folder"
            )

    try:
        on_main_rank(claim)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
