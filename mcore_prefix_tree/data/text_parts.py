"""Texts cut at a tokenizer's added tokens: texts that begin alike share their parts and token ids."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

# An added token, the text behind it, and the added token behind that; each may be empty at the border of a text.
Triple = tuple[str, ...]


def cut_texts(texts: Sequence[str], separator: re.Pattern[str]) -> Iterator[tuple[int, list[Triple]]]:
    """Yield for each text the number of triples that begin the text before it too, and the triples behind these."""
    previous, triples, ends = "", list[Triple](), list[int]()
    for text in texts:
        kept = max(bisect_right(ends, common_length(previous, text)) - 1, 0)
        del triples[kept:], ends[kept:]
        end = ends[-1] if ends else 0
        parts = [triples[-1][2] if triples else "", *separator.split(text[end:]), ""]
        own = [tuple(parts[at : at + 3]) for at in range(0, len(parts) - 2, 2)]
        for triple in own:
            triples.append(triple)
            end += len(triple[1]) + len(triple[2])
            ends.append(end)
        yield kept, own
        previous = text


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of characters that two texts begin with, or of entries that two lists begin with."""
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
