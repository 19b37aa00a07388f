"""A difference of two samples, and the cause that it has."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mcore_prefix_tree.data.causes.align_texts import Decode, Tokens, text_of
from mcore_prefix_tree.data.causes.words import Words

# Tokens of two sequences: the place where each differs, and the place where they meet again.
Span = tuple[int, int, int, int]
CauseName = Literal["retokenised", "thinking", "call ids", "prompt", "rewritten", "unknown"]


class Difference(NamedTuple):
    """Tokens ``start:end`` of a sample that a fix would replace; no meeting was seen after ``end`` if ``is_bound``."""

    start: int
    end: int
    tokens: Tokens
    cause: CauseName
    detail: str = ""
    words: Words | None = None
    is_bound: bool = False


def retokenised(one: Tokens, other: Tokens, span: Span, decode: Decode | None) -> Difference | None:
    """Return the difference if both sides, int32 ``[n]`` and ``[m]``, of a span have the same text."""
    start, end, other_start, other_end = span
    if decode is None or min(end - start, other_end - other_start) == 0:
        return None
    text = text_of(decode, one, start, end)
    if not text or text != text_of(decode, other, other_start, other_end):
        return None
    return Difference(other_start, other_end, one[start:end], "retokenised", words=Words(text, text, "words"))
