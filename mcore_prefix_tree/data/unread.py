"""Fields that nobody reads, though their names are close to those of fields that are: ``lossmask``, ``rewards``."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Iterable

logger = logging.getLogger(__name__)

_CLOSE = 0.85
_seen: set[str] = set()


def notice_unread(names: Iterable[str], known: Collection[str], source: str) -> None:
    """Warn of each such name, once in a process and on the first rank alone; data may have fields of its own.

    Args:
        names: fields of a record.
        known: fields that are read.
        source: place of the record.
    """
    for name in names:
        if name in known or name in _seen:
            continue
        _seen.add(name)
        meant = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        if meant and os.environ.get("RANK", "0") == "0":
            logger.warning("%s: field '%s' is not read; is '%s' meant?", source, name, meant[0])
