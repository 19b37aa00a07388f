"""Work that one rank of each machine does for the others, with the arrays of its result in a file that all map."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mcore_prefix_tree.utils.ranks import Ranks

T = TypeVar("T")
_ALIGNED = 64


def once_per_node(action: Callable[[], T], ranks: Ranks, files: object) -> T:
    """Return the result of an action, which the first rank of each machine with the same ``files`` runs; all together.

    The others find the result in a file, and share the pages of its arrays. A rank that cannot read it, for example in
    a container of its own, or for which no room was left, runs the action too.

    Raises:
        ValueError, OSError, MemoryError: the action's, on every rank.
    """
    hosts: list[object] = ranks.gather((socket.gethostname(), files))
    is_first = hosts.index(hosts[ranks.rank]) == ranks.rank
    folder: str | None = None
    result: T | None = None
    failure: BaseException | None = None
    if is_first:
        try:
            result = action()
            if hosts.count(hosts[ranks.rank]) > 1:
                folder = tempfile.mkdtemp(prefix="mcore_prefix_tree-")
                _write(result, Path(folder))
        except (ValueError, OSError, MemoryError) as error:
            if result is None:
                failure = error
            elif folder is not None:  # no room
                shutil.rmtree(folder, ignore_errors=True)
    try:
        told: list[tuple[str | None, BaseException | None]] = ranks.gather((folder, failure))
        failures = [error for _, error in told if error is not None]
        if failures:
            raise failures[0]
        if not is_first:
            result = _read(told[hosts.index(hosts[ranks.rank])][0])
        if result is None:
            result = action()
        ranks.gather(None)  # all have opened it
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def _write(result: object, folder: Path) -> None:
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(result, protocol=5, buffer_callback=arrays.append)
    ends, at = [], 0
    with (folder / "arrays").open("wb") as stream:
        for one in arrays:
            raw = one.raw()
            stream.write(raw)
            stream.write(b"\0" * (-raw.nbytes % _ALIGNED))
            ends.append((at, at + raw.nbytes))
            at = stream.tell()
    (folder / "head").write_bytes(pickle.dumps((head, ends)))


def _read(folder: str | None) -> T | None:  # type: ignore[type-var]
    """Return what :func:`_write` wrote, with read-only arrays; None if it cannot be read."""
    if folder is None:
        return None
    try:
        head, ends = pickle.loads((Path(folder) / "head").read_bytes())
        path = Path(folder) / "arrays"
        mapped: Any = memoryview(np.memmap(path, np.uint8, "r").data if os.path.getsize(path) else b"")
    except OSError:
        return None
    found: T = pickle.loads(head, buffers=[mapped[start:end] for start, end in ends])
    return found
