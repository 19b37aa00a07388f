"""Words in which two texts differ, and the kind of these words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.trie import common_prefix_length

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


Kind = Literal["call id", "date", "id", "number", "words"]
# ``opening`` is a user's message before any other role but the system has spoken.
Region = Literal["system", "tools", "opening", "conversation", "unknown"]

# Tokens on both sides of a difference that are decoded with it, and characters that decide on its kind.
_AROUND = 40
_NEAR = 24
# Text before a difference in which the last role is looked for.
_ROLE_TOKENS = (512, 4096)
_PUNCTUATION = ".,;:!?"
_EDGES = " \t\r\n\"'`,;()[]{}<>|="

_MONTHS = "Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:tember)?|Oct(?:ober)?"
_MONTHS += "|Nov(?:ember)?|Dec(?:ember)?"
_TIME = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?|\b1[5-9]\d{8}(?:\d{3})?\b")
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.]\d+)?)?)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rf"|{_TIME.pattern}"
    rf"|(?:\d{{1,2}}(?:st|nd|rd|th)?\s+)?(?:{_MONTHS})\b\.?(?:\s+\d{{1,2}}(?:st|nd|rd|th)?\b)?(?:,?\s+\d{{4}})?"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b",
    re.IGNORECASE,
)
_UUID = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
_CALL = re.compile(r"(?:call|toolu|fc|chatcmpl-tool|tool_call)[-_][-A-Za-z0-9_]{4,}|call\d{4,}")
# A field for the id of a call, before its value.
_CALL_FIELD = re.compile(r"(?:tool_?)?call_?id\W{0,8}$|\[CALL_ID\]\s*$", re.IGNORECASE)
# The id of an object that is a call: its name follows, or its arguments are before.
_ID_FIELD = re.compile(r"\"id\"\s*:\s*\"$")
_OF_CALL_BEFORE = re.compile(r"}\"?\s*,\s*\"id\"\s*:\s*\"$")
_OF_CALL_AFTER = re.compile(r"\"\s*,\s*\"(?:name|type|function)\"")
_ID = re.compile(r"(?=[-_A-Za-z]*\d)(?=[-_\d]*[A-Za-z])[-_A-Za-z0-9]{8,}")
_NUMBER = re.compile(r"[-+]?\d[\d.,:/]*")
_MARK = (
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<\|start\|>|<start_of_turn>|<\|turn>|<[|\uff5c]|\[/?|<</?"
    r"|(?:^|\n)[#* ]*)\s*"
)
_ROLE = re.compile(
    _MARK + r"(system_prompt|system|sys|developer|available_tools|user|human|inst|assistant|model|ai|tool_results"
    r"|tool_calls|tool_content|tool|observation|ipython|function)(?=[\]>|:\uff5c<\n]|\s*$)",
    re.IGNORECASE,
)
_SYSTEM = {"system_prompt", "system", "sys", "developer", "available_tools"}
_USERS = {"user", "human", "inst"}
_TOOLS = re.compile(r"# Tools\b|<tools>|\[AVAILABLE_TOOLS\]|\"parameters\"\s*:|namespace functions", re.IGNORECASE)
THINKING = re.compile(
    r"<(think|thinking|thought|reasoning|reason|seed:think)>.*?</\1>|\[THINK\].*?\[/THINK\]|\u25c1think\u25b7.*?\u25c1/think\u25b7"
    r"|<\|START_THINKING\|>.*?<\|END_THINKING\|>|<\|begin_of_thought\|>.*?<\|end_of_thought\|>"
    r"|<\|channel\|>analysis.*?(?:<\|end\|>(?:<\|start\|>assistant)?|(?=<\|channel\|>))",
    re.DOTALL,
)
_THINKING_MARK = re.compile(
    r"</?(?:think|thinking|thought|reasoning|reason|seed:think)>|\[/?THINK\]|\u25c1/?think\u25b7|<\|(?:START|END)_THINKING\|>"
    r"|<\|(?:begin|end)_of_thought\|>|<\|channel\|>analysis"
)


class Words(NamedTuple):
    """Words in which two texts differ, and their kind."""

    left: str
    right: str
    kind: Kind


def differing_words(decode: Decode, left: Tokens, right: Tokens, span: tuple[int, int, int, int]) -> Words | None:
    """Return the words that differ in ``left[start:end]`` and ``right[other_start:other_end]``; None without text."""
    start, end, other_start, other_end = span
    before = common_prefix_length(
        left[max(0, start - _AROUND) : start][::-1], right[max(0, other_start - _AROUND) : other_start][::-1]
    )
    if before < RUN:  # within a word that they share a part of
        before = min(_AROUND, start, other_start)
    after = common_prefix_length(left[end : end + _AROUND], right[other_end : other_end + _AROUND])
    one = decode_span(decode, left, start - before, end + after)
    other = decode_span(decode, right, other_start - before, other_end + after)
    if one is None or other is None:
        return None
    least = min(len(one), len(other))
    head = next((at for at in range(least) if one[at] != other[at]), least)
    tail = next((at for at in range(least - head) if one[-1 - at] != other[-1 - at]), least - head)
    while head and one[head - 1] not in _EDGES:
        head -= 1
    while tail and one[len(one) - tail] not in _EDGES:
        tail -= 1
    words = one[head : len(one) - tail].strip(), other[head : len(other) - tail].strip()
    near = [text[max(0, head - _NEAR) : len(text) - max(0, tail - _NEAR)] for text in (one, other)]
    ahead, behind = one[max(0, head - 2 * _NEAR) : head], one[len(one) - tail :][: 2 * _NEAR]
    return Words(*words, kind=_kind(words, (near[0], near[1]), ahead, behind))


def _kind(words: tuple[str, str], near: tuple[str, str], before: str, behind: str) -> Kind:
    given = [bare for bare in (word.strip(_PUNCTUATION) for word in words) if bare]
    if not given:
        return "words"
    is_field = _CALL_FIELD.search(before) is not None
    if all(_CALL.fullmatch(word) or (is_field and " " not in word) for word in given):
        return "call id"
    if all(map(_UUID.search, given)):
        return "id"
    if len(given) == 2 and all(map(_is_date, words, near)):
        return "date"
    if all(map(_ID.fullmatch, given)):
        is_of_call = _OF_CALL_BEFORE.search(before) or (_ID_FIELD.search(before) and _OF_CALL_AFTER.match(behind))
        return "call id" if is_of_call else "id"
    return "number" if all(map(_NUMBER.fullmatch, given)) else "words"


def _is_date(word: str, near: str) -> bool:
    return any(
        found.start() < near.find(word) + len(word) and near.find(word) < found.end() for found in _DATE.finditer(near)
    )


def has_time(words: Words) -> bool:
    """Return whether both words hold a time of day."""
    return bool(_TIME.search(words.left) and _TIME.search(words.right))


def has_thinking(text: str) -> bool:
    """Return whether a text holds a mark of thinking."""
    return _THINKING_MARK.search(text) is not None


def find_region(decode: Decode, tokens: Tokens, at: int) -> Region:
    """Return the part of a conversation, int32 ``[n]``, that a place is in, by the last role named before it."""
    for window in _ROLE_TOKENS:
        text = decode(tokens[max(0, at - window) : at].tolist()) or ""
        roles = [(found[1].lower(), found.end()) for found in _ROLE.finditer(text)]
        if roles:
            last, end = roles[-1]
            if last in _SYSTEM:
                return "tools" if last == "available_tools" or _TOOLS.search(text, end) else "system"
            if window >= at:
                return "opening" if all(role in _SYSTEM | _USERS for role, _ in roles) else "conversation"
            if any(role not in _SYSTEM | _USERS for role, _ in roles):
                return "conversation"
        if window >= at:
            break
    return "conversation" if roles else "unknown"


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
    text = decode_span(decode, one, start, end)
    if not text or text != decode_span(decode, other, other_start, other_end):
        return None
    return Difference(other_start, other_end, one[start:end], "retokenised", words=Words(text, text, "words"))
