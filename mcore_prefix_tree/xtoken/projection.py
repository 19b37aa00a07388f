"""Projection matrices: what a student's token is worth in the teacher's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A sparse matrix W from the student's vocabulary (rows) to the teacher's (columns).

    Attributes:
        columns: int32 ``[V_s, k]``, ids of the teacher's vocabulary by descending weight; -1 where a row has fewer.
        weights: float32 ``[V_s, k]``, 0 where ``columns`` is -1; a row that is not empty adds up to 1.
        teacher_vocab_size: V_t.
        student_hash: identifies the student's tokenizer.
        teacher_hash: identifies the teacher's tokenizer.
    """

    columns: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    teacher_vocab_size: int
    student_hash: str = ""
    teacher_hash: str = ""

    @property
    def student_vocab_size(self) -> int:
        """V_s."""
        return len(self.columns)
