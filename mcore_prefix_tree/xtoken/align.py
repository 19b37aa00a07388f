"""Byte-boundary alignment: a chunk ends wherever a student's token and a teacher's token end at the same byte.

Legend: n student tokens, m teacher tokens, C chunks, N selected tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.xtoken.token_bytes import BoolArray, Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """Chunks of equal text in order: int64 ``[C, 2]``, first token and end (exclusive), on each side; none is empty."""

    student: Int64Array
    teacher: Int64Array

    def __len__(self) -> int:
        return len(self.student)

    def keep(self, chunks: BoolArray) -> Alignment:
        """Return the chunks that a mask ``[C]`` selects."""
        return Alignment(student=self.student[chunks], teacher=self.teacher[chunks])


NOTHING = Alignment(student=np.empty((0, 2), dtype=np.int64), teacher=np.empty((0, 2), dtype=np.int64))


def align_ends(
    student_ends: Int64Array, teacher_ends: Int64Array, student_has_text: BoolArray, teacher_has_text: BoolArray
) -> Alignment:
    """Align two sequences by the ends of their tokens in one common text.

    The result is prefix-causal: chunks that end inside a prefix of both sequences depend only on that prefix. A token
    without bytes, for example SentencePiece's leading mark, belongs to the chunk of the token after it. A chunk that
    another token interrupts, for example a control token inside a word, is omitted. Time and memory are linear in
    tokens and bytes.

    Args:
        student_ends: int64 ``[n]``, byte at which each token ends; never falls.
        teacher_ends: int64 ``[m]``, likewise in the same text.
        student_has_text: bool ``[n]``, mask of the tokens that may belong to a chunk.
        teacher_has_text: bool ``[m]``, likewise.
    """
    sides = [_TextTokens.of(student_ends, student_has_text), _TextTokens.of(teacher_ends, teacher_has_text)]
    ends_there = np.zeros(1 + max(int(side.borders.max(initial=0)) for side in sides), dtype=np.bool_)
    ends_there[sides[1].borders] = True
    borders = sides[0].borders[ends_there[sides[0].borders]]
    student, teacher = (side.ranges(borders) for side in sides)
    whole = (student[:, 2] == 1) & (teacher[:, 2] == 1)
    return Alignment(student=student[whole, :2], teacher=teacher[whole, :2])


@dataclass(frozen=True, kw_only=True, eq=False)
class _TextTokens:
    """The tokens of one side that have text, and the ends of their runs."""

    index: Int64Array  # int64 [N], the tokens
    ends: Int64Array  # int64 [N], byte at which each token ends, or at which the next one with a byte does
    borders: Int64Array  # int64, the different ends, ascending

    @classmethod
    def of(cls, ends: Int64Array, has_text: BoolArray) -> _TextTokens:
        """Select tokens from int64 ``[n]`` ends and bool ``[n]``, whether each has text."""
        index = np.flatnonzero(has_text)
        before = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])[index] if len(ends) else ends
        has_bytes = ends[index] > before
        # The next token with a byte; those after the last one are in no chunk.
        following: Int64Array = np.cumsum(has_bytes) - has_bytes
        borders = ends[index][has_bytes]
        inside = following < len(borders)
        return cls(index=index[inside], ends=borders[following[inside]], borders=borders)

    def ranges(self, borders: Int64Array) -> Int64Array:
        """Return first token, end and whether nothing lies between, ``[C, 3]``, of the chunks that end at borders."""
        last = np.searchsorted(self.ends, borders, side="right") - 1
        first = np.concatenate([np.zeros(1, dtype=np.int64), last[:-1] + 1])[: len(last)]
        start, end = self.index[first], self.index[last] + 1
        return np.stack([start, end, end - start == last - first + 1], axis=1)


def merged_ranges(alignments: list[Alignment]) -> Alignment:
    """Return the chunks of several alignments of the same two sequences, one after another."""
    if not alignments:
        return NOTHING
    return Alignment(
        student=np.concatenate([one.student for one in alignments]),
        teacher=np.concatenate([one.teacher for one in alignments]),
    )


def first_difference(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> int | None:
    """Return the first byte at which two texts (uint8, 1-d) differ, or one of them ends; None for equal texts."""
    common = min(len(one), len(other))
    differs = one[:common] != other[:common]
    if differs.any():
        return int(np.argmax(differs))
    return None if len(one) == len(other) else common
