"""Projection matrices: the weights of a student's token in the teacher's vocabulary.

Legend: V_s and V_t tokens of the student's and the teacher's vocabulary, k entries of a row, E entries of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A sparse matrix W from the student's vocabulary (rows) to the teacher's (columns)."""

    # int32 [V_s, k], ids of the teacher's vocabulary by descending weight; -1 if a row has fewer.
    columns: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]  # float32 [V_s, k], 0 where columns is -1; a row that is not empty adds up to 1
    teacher_vocab_size: int
    student_hash: str = ""  # hash that identifies the student's tokenizer
    teacher_hash: str = ""  # hash that identifies the teacher's tokenizer

    @property
    def student_vocab_size(self) -> int:
        """Return V_s."""
        return len(self.columns)


class Entries(NamedTuple):
    """Entries of a matrix, ``[E]`` each: int32 or int64 rows and columns, float64 weights of at least 0."""

    rows: IntArray
    columns: IntArray
    weights: FloatArray


def from_entries(entries: Entries, shape: tuple[int, int], top_k: int) -> Projection:
    """Add up the entries of a ``[V_s, V_t]`` matrix and keep the ``top_k`` of each row, scaled to add up to 1.

    Entries may come in any order, and those of one place are added; of equal weights the lower id is kept.
    """
    (rows, columns, weights), (student_vocab_size, teacher_vocab_size) = entries, shape
    place, group = np.unique(rows.astype(np.int64) * teacher_vocab_size + columns, return_inverse=True)
    total = np.bincount(group, weights=weights, minlength=len(place)).astype(np.float64)
    place, total = place[total > 0], total[total > 0]
    row, column = np.divmod(place, teacher_vocab_size)
    order = np.lexsort((column, -total, row))
    row, column, total = row[order], column[order], total[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    kept = rank < top_k
    row, column, total, rank = row[kept], column[kept], total[kept], rank[kept]
    dense = np.full((student_vocab_size, top_k), -1, dtype=np.int32)
    values = np.zeros((student_vocab_size, top_k))
    dense[row, rank], values[row, rank] = column, total
    return Projection(columns=dense, weights=_normalised(values), teacher_vocab_size=teacher_vocab_size)


def trim(projection: Projection, top_k: int) -> Projection:
    """Keep the ``top_k`` heaviest entries per row, scaled to add up to 1; raises ValueError if it is less than 1."""
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    return replace(
        projection,
        columns=projection.columns[:, :top_k].copy(),
        weights=_normalised(projection.weights[:, :top_k].astype(np.float64)),
    )


def with_exact_map(projection: Projection, student_tokens: IntArray, teacher_tokens: IntArray) -> Projection:
    """Give each student's token ``[E]`` the full weight of its row to the teacher's token ``[E]`` that it equals."""
    columns, weights = projection.columns.copy(), projection.weights.copy()
    columns[student_tokens], weights[student_tokens] = -1, 0.0
    columns[student_tokens, 0], weights[student_tokens, 0] = teacher_tokens, 1.0
    return replace(projection, columns=columns, weights=weights)


def _normalised(values: FloatArray) -> npt.NDArray[np.float32]:
    """Scale rows of ``[V_s, k]`` to add up to 1; rows of zeros stay."""
    total = values.sum(axis=1, keepdims=True)
    normalised: npt.NDArray[np.float32] = (values / np.where(total > 0, total, 1.0)).astype(np.float32)
    return normalised
