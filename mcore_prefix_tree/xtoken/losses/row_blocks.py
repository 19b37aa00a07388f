"""Chunks cut into blocks of bounded size, with the inputs of a loss for each on the device.

Legend: C chunks of a block, A rows of a block, n predictors of its chunks (a row that several chunks read counts for
each), k any number of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.xtoken.fold import Chunks, Side

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSide:
    """The predictors of one model's chunks in a block."""

    rows: torch.Tensor  # int64 [A], indices of the head's rows that the block reads, ascending
    row: torch.Tensor  # int64 [n], each predictor's place in rows
    chunk: torch.Tensor  # int64 [n], chunk that each predictor belongs to, ascending
    token: torch.Tensor  # int64 [n], the token that it predicts
    share: torch.Tensor  # float64 [n], one over the predictors of its chunk
    last: torch.Tensor  # int64 [C], the last predictor of each chunk
    # float64 [n], log-probability of each token, if it is known beforehand; otherwise None.
    realised: torch.Tensor | None = None

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the means ``[C, k]`` over each chunk's predictors, from ``[A, k]``."""
        # A product, not a scatter: a GPU adds it up in one order.
        matrix = values.new_zeros(len(self.last), len(self.rows))
        return matrix.index_put((self.chunk, self.row), self.share.to(values.dtype)) @ values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums ``[C]`` over each chunk's predictors, from ``[n]``."""
        return values.new_zeros(len(self.last)).index_add(0, self.chunk, values)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Some chunks of a micro-batch."""

    chunks: slice  # slice of the ordered chunks
    student: BlockSide
    teacher: BlockSide
    weight: torch.Tensor  # float64 [C], weight of each chunk's term


def ordered(chunks: Chunks) -> Chunks:
    """Return the chunks by their first predictors, so that chunks of one block read the same rows if possible."""
    first = [side.rows[side.starts[:-1]] for side in (chunks.teacher, chunks.student)]
    return take(chunks, np.lexsort(first))


def take(chunks: Chunks, order: Int64Array) -> Chunks:
    """Return some of the chunks in an order, int64 ``[C]``."""
    return Chunks(
        student=_taken(chunks.student, order),
        teacher=_taken(chunks.teacher, order),
        weight=chunks.weight[order],
        multiplicity=chunks.multiplicity[order],
        first_sample=chunks.first_sample[order],
    )


def take_ending(chunks: Chunks, start: int, end: int) -> Chunks:
    """Return the chunks whose last predictor of the student's is in ``start:end``, with its rows counted from there."""
    last = chunks.student.rows[chunks.student.starts[1:] - 1]
    own = take(chunks, np.flatnonzero((last >= start) & (last < end)))
    return replace(own, student=replace(own.student, rows=own.student.rows - start))


def cut_blocks(
    chunks: Chunks,
    *,
    student_rows: Int64Array,
    teacher_rows: Int64Array,
    student_limit: int,
    teacher_limit: int,
    device: torch.device | str = "cpu",
) -> list[Block]:
    """Cut ordered chunks into blocks of bounded numbers of predictors; a chunk above a limit is a separate block.

    ``student_rows`` and ``teacher_rows`` are flat indices of the heads' rows, int64, ascending, of all predictors.
    """
    return [
        Block(
            chunks=part,
            student=_block_side(chunks.student, part, student_rows, device),
            teacher=_block_side(chunks.teacher, part, teacher_rows, device),
            weight=upload(chunks.weight[part], device),
        )
        for part in _cut(chunks, student_limit, teacher_limit)
    ]


def _cut(chunks: Chunks, student_limit: int, teacher_limit: int) -> Iterator[slice]:
    start = 0
    while start < len(chunks):
        stops = [
            int(np.searchsorted(side.starts, side.starts[start] + limit, side="right")) - 1
            for side, limit in ((chunks.student, student_limit), (chunks.teacher, teacher_limit))
        ]
        stop = max(start + 1, min(stops))
        yield slice(start, stop)
        start = stop


def _taken(side: Side, order: Int64Array) -> Side:
    """Return the predictors of chunks in an order, int64 ``[C]``."""
    lens = np.diff(side.starts)[order]
    starts = np.concatenate([[0], np.cumsum(lens)])
    at = np.repeat(side.starts[:-1][order] - starts[:-1], lens) + np.arange(starts[-1])
    realised = None if side.realised is None else side.realised[at]
    return Side(rows=side.rows[at], tokens=side.tokens[at], starts=starts, realised=realised)


def _block_side(side: Side, part: slice, rows: Int64Array, device: torch.device | str) -> BlockSide:
    """Return a block's predictors; ``rows`` are all of the head's, int64, ascending."""
    own = slice(int(side.starts[part.start]), int(side.starts[part.stop]))
    lens = np.diff(side.starts[part.start : part.stop + 1])
    read, row = np.unique(side.rows[own], return_inverse=True)
    place = np.searchsorted(rows, read)
    assert (rows[np.minimum(place, len(rows) - 1)] == read).all(), "the head has every predictor"
    return BlockSide(
        rows=upload(place, device),
        row=upload(row, device),
        chunk=upload(np.repeat(np.arange(len(lens)), lens), device),
        token=upload(side.tokens[own].astype(np.int64), device),
        share=upload(np.repeat(1 / lens, lens), device),
        last=upload(np.cumsum(lens) - 1, device),
        realised=None if side.realised is None else upload(side.realised[own], device),
    )
