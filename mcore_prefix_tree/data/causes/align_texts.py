"""Places where two diverging token sequences, int32 ``[n]`` and ``[m]``, meet again or repeat the other's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
# Text of tokens, for people; None if the tokens are of another vocabulary.
Decode = Callable[[Sequence[int]], str | None]

# Sequences that have this many tokens in common behind a difference have met again.
RUN = 8
_NEAR_RUN = 4
# How far ahead a meeting is looked for: near first, because most differences are short.
_WINDOWS = (64, 1024, 16384)
# Tokens before a place that are decoded with the next ones: some tokenizers write a space only between tokens.
_CONTEXT = 8
_BYTES = np.dtype(np.int32).itemsize


def meeting(left: Tokens, right: Tokens) -> tuple[int, int] | None:
    """Return how far ``[n]`` and ``[m]``, unequal at first, go until :data:`RUN` tokens are equal; None if never."""
    for size in _WINDOWS:
        met = _met(left[:size].tobytes(), right[:size].tobytes(), RUN)
        if met is not None or size >= max(len(left), len(right)):
            return met
    return None


def near_meeting(left: Tokens, right: Tokens) -> tuple[int, int] | None:
    """Return the same for the first few tokens of ``[n]`` and ``[m]``, of which fewer equal ones are enough."""
    return _met(left[: _WINDOWS[0]].tobytes(), right[: _WINDOWS[0]].tobytes(), _NEAR_RUN)


def _met(left: bytes, right: bytes, run: int) -> tuple[int, int] | None:
    width = run * _BYTES
    places = (
        {right[at : at + width]: at for at in range(len(right) - width, -1, -_BYTES)} if len(right) >= width else {}
    )
    best: tuple[int, int] | None = None
    for at in range(0, len(left) - width + 1, _BYTES):
        if best is not None and at >= sum(best):
            break
        place = places.get(left[at : at + width])
        if place is not None and place % _BYTES == 0 and (best is None or at + place < sum(best)):
            best = at, place
    return None if best is None else (best[0] // _BYTES, best[1] // _BYTES)


def meeting_at_end(left: Tokens, right: Tokens) -> tuple[int, int] | None:
    """Return the same for the last tokens of ``left``, ``[n]``, fewer than :data:`RUN` but at least two."""
    window = right[: _WINDOWS[1]]
    for count in range(min(RUN - 1, len(left)), 1, -1):
        tail = left[-count:]
        starts = np.flatnonzero(window[: len(window) - count + 1] == tail[0])
        for start in starts.tolist():
            if np.array_equal(window[start : start + count], tail):
                return len(left) - count, start
    return None


def decode_span(decode: Decode, tokens: Tokens, start: int, end: int) -> str | None:
    """Return the text that ``tokens[start:end]`` adds to the text before it; None if it cannot be decoded."""
    before = max(0, start - _CONTEXT)
    both, head = decode(tokens[before:end].tolist()), decode(tokens[before:start].tolist())
    if both is None or head is None:
        return None
    head = head.rstrip("\ufffd")
    return both[len(head) :] if both.startswith(head) else decode(tokens[start:end].tolist())


def end_of_text(decode: Decode, tokens: Tokens, start: int, text: str) -> int | None:
    """Return the least ``end`` with ``tokens[start:end]`` beginning with a text; None if they begin with another."""
    most = min(len(tokens) - start, len(text.encode()) + 1)

    def length(count: int) -> int:
        return len((decode_span(decode, tokens, start, start + count) or "").rstrip("\ufffd"))

    first = (decode_span(decode, tokens, start, min(start + _CONTEXT, len(tokens))) or "").rstrip("\ufffd")
    if not (text.startswith(first) or first.startswith(text)):
        return None
    high = 1
    while high < most and length(high) < len(text):
        high = min(2 * high, most)
    found = decode_span(decode, tokens, start, start + high) if most > 0 else None
    if found is None or not found.startswith(text):
        return None
    low = high // 2
    while low < high:  # length(high) is enough, length(low - 1) is not
        middle = (low + high) // 2
        if length(middle) >= len(text):
            high = middle
        else:
            low = middle + 1
    return start + high
