"""Differences of a sample from one that it should begin with, because its history holds it."""

from __future__ import annotations

from functools import partial

import numpy as np

from mcore_prefix_tree.data.causes.words import (
    THINKING,
    Decode,
    Difference,
    Span,
    Tokens,
    Words,
    decode_span,
    differing_words,
    end_of_text,
    find_region,
    has_thinking,
    meeting,
    meeting_at_end,
    retokenised,
)
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import common_prefix_length

# Differences within one sample, tokens whose text is compared at once, and tokens that are shown of an unknown rest.
_DIFFERENCES = 64
_LONGEST = 16384
_SHOWN = 64
# Tokens that tell whether a text may be the same, and tokens before a difference that may hold a mark of thinking.
_FEW = 8


def resend(origin: Sample, sample: Sample, at: int, decode: Decode | None) -> list[Difference]:
    """Return the differences of a sample from ``origin`` after ``at``; none if the rest of ``origin`` is not found."""
    one, other = origin.tokens, sample.tokens
    left, right = at, at
    found: list[Difference] = []
    while left < len(one):
        if right >= len(other) or len(found) == _DIFFERENCES:
            return []
        rest = None if decode is None else same_text(one, left, other, right, decode)
        if rest is not None:
            return [*found, rest]
        met = meeting(one[left:], other[right:]) or meeting_at_end(one[left:], other[right:])
        if met is None:
            return []
        span = left, left + met[0], right, right + met[1]
        found.append(_resent(one, other, span, decode))
        _, left, _, right = span
        run = common_prefix_length(one[left:], other[right:])
        left, right = left + run, right + run
    return found


def same_text(one: Tokens, left: int, other: Tokens, right: int, decode: Decode) -> Difference | None:
    """Return the difference if all of ``one``, ``[n]``, or all but thinking is in ``other``, ``[m]``, as text."""
    if len(one) - left > _LONGEST or not _may_repeat(one, left, other, right, decode):
        return None
    text = decode_span(decode, one, left, len(one))
    if not text:
        return None
    end = end_of_text(decode, other, right, text)
    if end is not None:
        return Difference(right, end, one[left:], "retokenised", words=Words(text, text, "words"))
    if not has_thinking(text):
        return None
    shorter = THINKING.sub("", text)
    for kept in (shorter, shorter.lstrip()):
        end = end_of_text(decode, other, right, kept) if kept and kept != text else None
        if end is not None:
            return Difference(right, end, one[left:], "thinking", words=Words(text, kept, "words"))
    return None


def _may_repeat(one: Tokens, left: int, other: Tokens, right: int, decode: Decode) -> bool:
    """Return whether the next few tokens, ``[n]`` and ``[m]``, look like the same text or like thinking."""
    texts = (
        decode_span(decode, one, left, min(left + _FEW, len(one))) or "",
        decode_span(decode, other, right, min(right + _FEW, len(other))) or "",
    )
    starts = [text.rstrip("\ufffd") for text in texts]
    return starts[0].startswith(starts[1]) or starts[1].startswith(starts[0]) or has_thinking(starts[0])


def _resent(one: Tokens, other: Tokens, span: Span, decode: Decode | None) -> Difference:
    """Return the difference of two samples, int32 ``[n]`` and ``[m]``, between the borders of a span."""
    start, end, other_start, other_end = span
    here = partial(Difference, other_start, other_end, one[start:end])
    if decode is None:
        return here("unknown")
    same = retokenised(one, other, span, decode)
    if same is not None:
        return same
    text, other_text = decode_span(decode, one, start, end), decode_span(decode, other, other_start, other_end)
    words = differing_words(decode, one, other, span)
    if text is None or other_text is None or words is None:
        return here("unknown")
    before = decode_span(decode, one, max(0, start - _FEW), start)
    if has_thinking(text) or (len(text) > len(other_text) and has_thinking(before or "")):
        return here("thinking", words=Words(text, other_text, "words"))
    if words.kind == "call id":
        return here("call ids", words=words)
    region = find_region(decode, one, start)
    if words.kind in ("date", "id") or region in ("system", "tools"):
        is_tools = region == "tools" and words.kind == "words"
        return here("prompt", detail="tools" if is_tools else words.kind, words=words)
    return here("rewritten", words=words)


def unmet(origin: Sample, sample: Sample, left: int, right: int, decode: Decode | None) -> Difference:
    """Return the difference of sequences that do not meet again, as if all context of the answer were shared."""
    end = max(right, last_answer(sample))
    here = partial(Difference, right, end, origin.tokens[left:], is_bound=True)
    span = left, min(len(origin), left + _SHOWN), right, min(len(sample), right + _SHOWN)
    words = None if decode is None else differing_words(decode, origin.tokens, sample.tokens, span)
    if words is None:
        return here("unknown")
    return here("thinking" if has_thinking(words.left) and not has_thinking(words.right) else "rewritten", words=words)


def last_answer(sample: Sample) -> int:
    """Return the start of the last unbroken run of scored tokens; the sample's end without one."""
    scored = sample.loss_mask != 0
    begins = np.flatnonzero(scored & ~np.append(False, scored[:-1]))
    return int(begins[-1]) if len(begins) else len(sample)
