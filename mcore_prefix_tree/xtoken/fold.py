"""Chunks of folded samples: each unique one once, with the weight of all samples that have it.

Legend: K chunks of all pairs, C unique chunks, A, B predictors of the unique chunks on each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout.flat import FlatLayout
from mcore_prefix_tree.xtoken.pairs import Pair
from mcore_prefix_tree.xtoken.token_bytes import Int64Array

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The predictors of one model's chunks, in its own flat layout."""

    rows: Int64Array  # int64 [A], flat indices of the predictors, chunk after chunk
    tokens: Int32Array  # int32 [A], the token that each of them predicts in the chunk's text
    starts: Int64Array  # int64 [C + 1]; chunk c has rows[starts[c]:starts[c + 1]], at least one
    # float64 [A], log-probability of each of tokens, if it is known beforehand; otherwise None.
    realised: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """The unique chunks of a micro-batch, on the host.

    Chunks of several samples that have the same predictors on both sides (and, for losses that read them, the same
    tokens) are one chunk with the sum of their weights.
    """

    student: Side
    teacher: Side
    weight: npt.NDArray[np.float64]  # float64 [C], the weights of the samples that share a chunk, added up
    multiplicity: npt.NDArray[np.float64]  # float64 [C], number of samples that share it
    first_sample: Int64Array  # int64 [C], the first sample of the micro-batch that has it, for messages

    def __len__(self) -> int:
        return len(self.weight)


_INT64_MAX = int(np.iinfo(np.int64).max)


def fold_chunks(student: FlatLayout, teacher: FlatLayout, pairs: Sequence[Pair], *, keyed_by_tokens: bool) -> Chunks:
    """Find the unique chunks of a micro-batch.

    A loss that adds up ``weight * term`` over them equals the loss that adds up the terms of every pair separately: a
    chunk's predictors see the same tokens in every sample that shares them. They are in order of their last predictor
    in the student's layout, so their order does not depend on that of the pairs.

    Args:
        student: layout of ``[pair.student for pair in pairs]``, in this order.
        teacher: layout of ``[pair.teacher for pair in pairs]``.
        keyed_by_tokens: whether the loss reads which tokens follow; otherwise chunks with the same predictors are one,
            with the tokens of its first sample.

    Raises:
        ValueError: a layout belongs to other samples.
    """
    _check_layout(student, [len(pair.student) for pair in pairs], "student")
    _check_layout(teacher, [len(pair.teacher) for pair in pairs], "teacher")
    counts = [len(pair) for pair in pairs]
    sample = np.repeat(np.arange(len(pairs)), counts)
    sides = (
        _Occurrences.of(student, [pair.alignment.student for pair in pairs], sample),
        _Occurrences.of(teacher, [pair.alignment.teacher for pair in pairs], sample),
    )
    # A flat index has one path, so the last predictor and their number say which predictors a chunk has, and all of
    # its tokens but the last.
    keys = [column for side in sides for column in (side.last, side.lengths)]
    if keyed_by_tokens:
        keys += [side.last_token for side in sides]
    first, group, multiplicity = unique_rows(keys)
    weight = np.concatenate([np.zeros(0), *(pair.weight for pair in pairs)])
    return Chunks(
        student=sides[0].side(student, first),
        teacher=sides[1].side(teacher, first),
        weight=np.bincount(group, weights=weight, minlength=len(first)).astype(np.float64),
        multiplicity=multiplicity.astype(np.float64),
        first_sample=sample[first],
    )


def _check_layout(layout: FlatLayout, lengths: list[int], side: str) -> None:
    if not np.array_equal(np.diff(layout.cu_sample_lens), lengths):
        raise ValueError(
            f"the {side}'s layout is not of the samples of these {len(lengths)} pairs; fold them in this order"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Occurrences:
    """The chunks of all pairs in one model's layout."""

    places: Int64Array  # int64 [K], place of each one's last token in the layout's sample_map
    lengths: Int64Array  # int64 [K], number of predictors
    last: Int64Array  # int64 [K], flat index of the last predictor
    last_token: Int64Array  # int64 [K], the token that it predicts

    @classmethod
    def of(cls, layout: FlatLayout, ranges: list[Int64Array], sample: Int64Array) -> _Occurrences:
        """Locate chunks; ``ranges``: ``[C, 2]`` of each pair; ``sample``: int64 ``[K]``, the pair of each chunk."""
        tokens = np.concatenate([np.empty((0, 2), dtype=np.int64), *ranges])
        places = layout.cu_sample_lens[sample] + tokens[:, 1] - 1
        return cls(
            places=places,
            # Nothing predicts a sample's first token.
            lengths=tokens[:, 1] - np.maximum(tokens[:, 0], 1),
            last=layout.sample_map[places - 1].astype(np.int64),
            last_token=layout.input_ids[layout.sample_map[places]].astype(np.int64),
        )

    def side(self, layout: FlatLayout, chosen: Int64Array) -> Side:
        """Return the predictors of chosen chunks, int64 indices ``[C]``."""
        lengths = self.lengths[chosen]
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        behind = np.repeat(self.places[chosen] + 1 - lengths, lengths) + np.arange(starts[-1])
        behind -= np.repeat(starts[:-1], lengths)
        return Side(
            rows=layout.sample_map[behind - 1].astype(np.int64),
            tokens=layout.input_ids[layout.sample_map[behind]],
            starts=starts,
        )


def unique_rows(columns: list[Int64Array]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Group rows of equal columns ``[K]`` in lexicographic order: first row, each row's group, size of each."""
    code = columns[0]
    for column in columns[1:]:
        size = int(column.max(initial=0)) + 1
        if (int(code.max(initial=0)) + 1) * size > _INT64_MAX:
            code = np.unique(code, return_inverse=True)[1]
        code = code * size + column
    _, first, group, count = np.unique(code, return_index=True, return_inverse=True, return_counts=True)
    return first, group, count
