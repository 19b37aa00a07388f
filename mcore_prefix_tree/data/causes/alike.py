"""Differences of two samples in words that should not matter: a date, an id, other tools, a system prompt's wording."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mcore_prefix_tree.data.causes.align_texts import RUN, Decode, Tokens
from mcore_prefix_tree.data.causes.difference import Difference, Span
from mcore_prefix_tree.data.causes.words import Region, Words, differing_words, has_time, region_of

# Alike samples differ in at most this many tokens, but for tools, and in this many words.
SHORT = 64
_WORDS = 12
# Numbers, and unknown tokens, are in the same prompt only if so many tokens behind them are equal.
_LONG_RUN = 64


def judged(
    one: Tokens,
    other: Tokens,
    span: Span,
    run: int,
    *,
    is_scored: bool,
    decode: Decode | None,
) -> Difference | None:
    """Return a difference of two prompts, int32 ``[n]`` and ``[m]``, if it is in words that should not matter."""
    start, end, other_start, other_end = span
    longest = max(end - start, other_end - other_start)
    here = partial(Difference, other_start, other_end, one[start:end])
    if decode is None:
        return here("unknown") if longest <= RUN and run >= _LONG_RUN and not is_scored else None
    words = differing_words(decode, one, other, span)
    if words is None or (longest > SHORT and words.kind != "words"):
        return None
    if words.kind == "call id":
        return here("call ids", words=words)
    return None if is_scored else _of_prompt(here, words, region_of(decode, one, start), longest, run)


def _of_prompt(
    here: Callable[..., Difference], words: Words, region: Region, longest: int, run: int
) -> Difference | None:
    prompt = partial(here, "prompt", words=words)
    if words.kind in ("date", "id"):
        is_fixed = region in ("system", "tools", "unknown")
        return prompt(detail=words.kind) if is_fixed or (region == "opening" and has_time(words)) else None
    if words.kind == "number":
        is_fixed = region in ("system", "tools") or (region == "unknown" and run >= _LONG_RUN)
        return prompt(detail="number") if is_fixed else None
    if region == "tools":
        return prompt(detail="tools")
    is_short = longest <= SHORT and max(len(text.split()) for text in words[:2]) <= _WORDS
    return prompt(detail="words") if region == "system" and is_short else None
