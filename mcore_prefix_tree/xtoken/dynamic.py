"""The dynamic-programming aligner: for text that two tokenizers normalise differently.

Byte alignment is exact and prefix-causal, this one is neither: the text after a prefix can change the alignment of the
prefix, so chunks of folded samples no longer are the chunks of each sample's beginning. Use it for compatibility.

Legend: n student tokens, m teacher tokens, C chunks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.xtoken.align import NOTHING, Alignment

# Scores are multiples of the price of a gap, so that integers count them exactly.
UNIT = 1.5
_MATCH, _GAP = 2, -1
LONGEST_RUN = 4
_IMPOSSIBLE = np.iinfo(np.int32).min // 2

# Moves, in the order that resolves ties: the first of the best is taken.
_DIAGONAL, _UP, _LEFT, _ONE_TO_MANY = 0, 1, 2, 3
_MANY_TO_ONE = _ONE_TO_MANY + LONGEST_RUN - 1


@dataclass(frozen=True)
class Step:
    """One move of the best path: student tokens ``[s_start, s_end)`` aligned with teacher tokens ``[t_start, t_end)``.

    A gap has no token on one side. ``is_equal`` is whether both sides have the same text.
    """

    s_start: int
    s_end: int
    t_start: int
    t_end: int
    is_equal: bool


def best_path(student: Sequence[str], teacher: Sequence[str]) -> tuple[list[Step], float]:
    """Return the moves that align n and m texts with the highest total score, from the first token on, and the score.

    Two tokens aligned with each other score 3 if they are equal and -3 if not, a token in a gap -1.5, and one token
    aligned with k = 2..4 tokens whose joined text it equals 1.5 k. Among equal scores the first in this order is taken:
    token with token, student's gap, teacher's gap, one student token, one teacher token (each with the smallest k).
    Time is O(n m), memory n m bytes.
    """
    moves, score = _fill(_numbered(student, teacher), len(student), len(teacher))
    steps = []
    i, j = len(student), len(teacher)
    while i or j:
        move = int(moves[i, j])
        s_len, t_len = _extent(move)
        i, j = i - s_len, j - t_len
        is_equal = move > _LEFT or (move == _DIAGONAL and student[i] == teacher[j])
        steps.append(Step(i, i + s_len, j, j + t_len, is_equal))
    return steps[::-1], score * UNIT


def _extent(move: int) -> tuple[int, int]:
    """Return how many student and teacher tokens a move covers."""
    if move <= _LEFT:
        return int(move != _LEFT), int(move != _UP)
    return (1, move - _ONE_TO_MANY + 2) if move < _MANY_TO_ONE else (move - _MANY_TO_ONE + 2, 1)


Numbers = list[npt.NDArray[np.int64]]


def _numbered(student: Sequence[str], teacher: Sequence[str]) -> tuple[Numbers, Numbers]:
    """Give each text a number; entry k of a side has at [i] the number of the k + 1 texts that end with the i-th."""
    known: dict[str, int] = {}

    def runs(texts: Sequence[str], length: int) -> npt.NDArray[np.int64]:
        joined = ("".join(texts[i - length : i]) if i >= length else None for i in range(len(texts) + 1))
        # A run that does not exist equals nothing.
        return np.array(
            [-1 - length if text is None else known.setdefault(text, len(known)) for text in joined], dtype=np.int64
        )

    lengths = range(1, LONGEST_RUN + 1)
    return [runs(student, length) for length in lengths], [runs(teacher, length) for length in lengths]


def _fill(numbers: tuple[Numbers, Numbers], n: int, m: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Return the best move into each cell, ``[n + 1, m + 1]``, and the score of the last one in units."""
    student, teacher = numbers
    moves = np.zeros((n + 1, m + 1), dtype=np.uint8)
    # Scores by anti-diagonal, indexed by i + LONGEST_RUN, so that every move from outside is impossible.
    recent = [np.full(n + 1 + LONGEST_RUN, _IMPOSSIBLE, dtype=np.int32) for _ in range(LONGEST_RUN + 1)]
    scores = np.full(n + 1 + LONGEST_RUN, _IMPOSSIBLE, dtype=np.int32)
    scores[LONGEST_RUN] = 0
    for diagonal in range(1, n + m + 1):
        recent = [scores, *recent[:-1]]
        i = np.arange(max(0, diagonal - m), min(n, diagonal) + 1)
        j = diagonal - i
        at = i + LONGEST_RUN
        is_match = student[0][i] == teacher[0][j]
        best = recent[1][at - 1] + np.where(is_match, _MATCH, -_MATCH)
        move = np.zeros(len(i), dtype=np.uint8)
        candidates = [(_UP, recent[0][at - 1] + _GAP), (_LEFT, recent[0][at] + _GAP)]
        for k in range(2, LONGEST_RUN + 1):
            fits = student[0][i] == teacher[k - 1][j]
            candidates.append((_ONE_TO_MANY + k - 2, np.where(fits, recent[k][at - 1] + k, _IMPOSSIBLE)))
        for k in range(2, LONGEST_RUN + 1):
            fits = teacher[0][j] == student[k - 1][i]
            candidates.append((_MANY_TO_ONE + k - 2, np.where(fits, recent[k][at - k] + k, _IMPOSSIBLE)))
        for code, candidate in candidates:
            is_better = candidate > best
            best = np.where(is_better, candidate, best)
            move[is_better] = code
        scores = np.full(n + 1 + LONGEST_RUN, _IMPOSSIBLE, dtype=np.int32)
        scores[at] = best
        moves[i, j] = move
    return moves, int(scores[n + LONGEST_RUN])


def align_dynamic(student: Sequence[bytes], teacher: Sequence[bytes]) -> Alignment:
    """Align the bytes of n and of m tokens whose texts may be normalised differently.

    Texts are compared in Unicode's compatibility decomposition (NFKD). Runs of moves that do not fit become one chunk
    if their joined texts are equal; otherwise they are in no chunk.
    """
    texts = [[_normal(token) for token in side] for side in (student, teacher)]
    steps, _ = best_path(texts[0], texts[1])
    found = []
    for is_equal, run in groupby(steps, key=lambda step: step.is_equal):
        if is_equal:
            found += [(step.s_start, step.s_end, step.t_start, step.t_end) for step in run]
            continue
        together = list(run)
        s_start, s_end, t_start, t_end = (
            together[0].s_start,
            together[-1].s_end,
            together[0].t_start,
            together[-1].t_end,
        )
        joined = [_normal(b"".join(student[s_start:s_end])), _normal(b"".join(teacher[t_start:t_end]))]
        if s_start < s_end and t_start < t_end and joined[0] == joined[1]:
            found.append((s_start, s_end, t_start, t_end))
    if not found:
        return NOTHING
    chunks = np.array(found, dtype=np.int64)
    return Alignment(student=chunks[:, :2], teacher=chunks[:, 2:])


def _normal(text: bytes) -> str:
    return unicodedata.normalize("NFKD", text.decode("utf-8", "surrogateescape"))
