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
    """Warn once per process, on the first rank only, of each name that is not among the ``known`` fields."""
    for name in names:
        if name in known or name in _seen:
            continue
        _seen.add(name)
        meant = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        if meant and os.environ.get("RANK", "0") == "0":
            logger.warning("%s: field '%s' is not read; is '%s' meant?", source, name, meant[0])
