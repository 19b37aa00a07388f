"""Chunks: the places of a micro-batch where student and teacher predict the same text.

Legend: C chunks, A student predictors of all chunks, B teacher predictors of all chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The predictors of one model's chunks, in its own flat layout.

    Attributes:
        rows: int64 ``[A]``, flat indices of the predictors, chunk after chunk.
        tokens: int32 ``[A]``, the token that each of them predicts in the chunk's text.
        starts: int64 ``[C + 1]``; chunk c has ``rows[starts[c]:starts[c + 1]]``, at least one.
        realised: float64 ``[A]``, log-probability of each of ``tokens``, if it is known beforehand; otherwise None.
    """

    rows: Int64Array
    tokens: Int32Array
    starts: Int64Array
    realised: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """The unique chunks of a micro-batch, on the host.

    Chunks of several samples that have the same predictors on both sides (and, for losses that read them, the same
    tokens) are one chunk with the sum of their weights.

    Attributes:
        weight: float64 ``[C]``, the weights of the samples that share a chunk, added up.
        multiplicity: float64 ``[C]``, number of samples that share it.
        first_sample: int64 ``[C]``, the first sample of the micro-batch that has it, for messages.
    """

    student: Side
    teacher: Side
    weight: npt.NDArray[np.float64]
    multiplicity: npt.NDArray[np.float64]
    first_sample: Int64Array

    def __len__(self) -> int:
        return len(self.weight)
