"""Fields that nobody reads, though their names look as if they were meant to be: ``lossmask``, ``rewards``."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Iterable
from functools import cache

logger = logging.getLogger(__name__)

_CLOSE = 0.85


def notice_unread(names: Iterable[str], known: Collection[str], source: str) -> None:
    """Warn of each such name, once in a process and on the first rank alone.

    Data may carry what it likes; so this is no error.

    Args:
        names: of a record's fields.
        known: that are read.
        source: where the names stand.
    """
    for name in names:
        if name not in known:
            _notice(name, tuple(known), source)


@cache
def _meant(name: str, known: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)), None)


_told: set[str] = set()


def _notice(name: str, known: tuple[str, ...], source: str) -> None:
    meant = _meant(name, known)
    if meant is not None and name not in _told:
        _told.add(name)
        if os.environ.get("RANK", "0") == "0":
            logger.warning("%s: field '%s' is not read; is '%s' meant?", source, name, meant)
