"""Texts cut at a tokenizer's added tokens: texts that begin alike share their parts and token ids."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Triple = tuple[str, ...]


def begins(ids: Ids, start: Ids) -> bool:
    """Return whether token ids, ``[n]``, begin with others, ``[m]``."""
    return np.array_equal(ids[: len(start)], start)


@dataclass(kw_only=True, eq=False)
class Parts:
    """A text in triples: an added token, the text behind it, and the added token behind that.

    The first ``kept`` triples are those of another text, ``base``. ``ends`` has the end of each in the text. ``ids``
    has the token ids, and ``counts`` those before each triple, once :meth:`join` is called.
    """

    text: str
    triples: list[Triple]
    ends: list[int]
    base: Parts | None = None
    kept: int = 0
    ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(cls, text: str, separator: re.Pattern[str], *bases: Parts) -> Parts:
        """Cut a text behind the triples that it shares with one of others, at least one token behind them."""
        shared = [(bisect_right(one.ends, common_length(one.text, text)) - 1, one) for one in bases]
        kept, base = max(shared, key=lambda pair: pair[0], default=(0, None))
        if base is None or kept <= 0:
            kept, base, ends, start, before = 0, None, [], 0, ""
        else:
            ends, start, before = base.ends[:kept], base.ends[kept - 1], base.triples[kept - 1][2]
        parts = [before, *separator.split(text[start:]), ""]
        own = [tuple(parts[at : at + 3]) for at in range(0, len(parts) - 2, 2)]
        for _, inner, after in own:
            start += len(inner) + len(after)
            ends.append(start)
        return cls(text=text, triples=[*(base.triples[:kept] if base else ()), *own], ends=ends, base=base, kept=kept)

    @property
    def own(self) -> list[Triple]:
        """The triples that are not those of ``base``."""
        return self.triples[self.kept :]

    def join(self, ids_of: Mapping[Triple, Ids]) -> Ids:
        """Return the token ids of the text; ``base`` has its own."""
        base, own = self.base, [ids_of[one] for one in self.own]
        shared = base.ids[: int(base.counts[self.kept])] if base is not None else self.ids
        known = base.counts[: self.kept] if base is not None else self.counts
        self.ids = np.concatenate([shared, *own])
        self.counts = np.concatenate([known, np.cumsum([len(shared), *map(len, own)])])
        return self.ids


def common_length(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
