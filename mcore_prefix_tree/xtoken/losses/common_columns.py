"""Two vocabularies over the same tensor-parallel ranks: this rank's columns, and those that mean the same token.

Legend: C chunks, V_s and V_t vocabularies, n columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.xtoken.losses.collectives import Group, exchange, group_rank, group_size
from mcore_prefix_tree.xtoken.projection import Projection

Int64Array = npt.NDArray[np.int64]

# The weight from which the first of a row's columns is the same token, if the map is relaxed.
RELAXED = 0.6


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One model's vocabulary on this rank; columns from its end on are padding, which no loss reads."""

    size: int  # V, number of tokens of the vocabulary, without padding
    borders: tuple[int, ...]  # first column of each rank, and the end of the last, padding included
    group: Group = None

    @classmethod
    def even(cls, size: int, columns: int, group: Group) -> Part:
        """Return the part of a vocabulary that is split evenly, ``columns`` to each rank."""
        return cls(size=size, borders=tuple(rank * columns for rank in range(group_size(group) + 1)), group=group)

    @property
    def start(self) -> int:
        """First column on this rank."""
        return self._clamped[group_rank(self.group)]

    @property
    def stop(self) -> int:
        """End of the columns on this rank that are not padding."""
        return self._clamped[group_rank(self.group) + 1]

    @property
    def width(self) -> int:
        """Columns on this rank that are not padding."""
        return self.stop - self.start

    @property
    def widths(self) -> list[int]:
        """Return the numbers of columns on each rank that are not padding."""
        return [stop - start for start, stop in pairwise(self._clamped)]

    @property
    def _clamped(self) -> list[int]:
        return [min(border, self.size) for border in self.borders]

    def owner(self, column: Int64Array) -> Int64Array:
        """Return int64, the rank that has each of some columns, of one shape."""
        return np.searchsorted(np.asarray(self.borders), column, side="right") - 1

    def here(self, column: Int64Array) -> Int64Array:
        """Return those of ascending columns (int64, 1-d) that this rank has, counted from its first."""
        return column[(column >= self.start) & (column < self.stop)] - self.start


def common_tokens(projection: Projection, *, relaxed: bool) -> tuple[Int64Array, Int64Array]:
    """Return the tokens that both vocabularies have, int64 ids of the student's and of the teacher's, paired.

    Strict takes the student's tokens whose first column has weight 1, and the lowest id if several have one column.
    ``relaxed`` takes those of weight 0.6 or more; if several have one column, that of the largest weight, then the
    lowest id.
    """
    first, weight = projection.columns[:, 0].astype(np.int64), projection.weights[:, 0]
    chosen = np.flatnonzero((first >= 0) & (weight >= RELAXED if relaxed else weight == 1))
    rank = np.lexsort((chosen, -weight[chosen], first[chosen]) if relaxed else (chosen, first[chosen]))
    column = first[chosen][rank]
    wins = np.concatenate([[True], column[1:] != column[:-1]])[: len(column)]
    order = np.argsort(chosen[rank][wins])
    return chosen[rank][wins][order], column[wins][order]


class CommonColumns:
    """Pairs the columns of common ``tokens``, int64 ids of both, paired, on the rank that has the teacher's."""

    def __init__(
        self, student: Part, teacher: Part, tokens: tuple[Int64Array, Int64Array], device: torch.device
    ) -> None:
        here, ranks = group_rank(student.group), group_size(student.group)
        of_student, of_teacher = tokens
        sender, receiver = student.owner(of_student), teacher.owner(of_teacher)
        # Both ends agree on the order of the pairs: by sender, by receiver, then as given.
        mine, theirs = sender == here, receiver == here
        outgoing = np.flatnonzero(mine)[np.argsort(receiver[mine], kind="stable")]
        incoming = np.flatnonzero(theirs)[np.argsort(sender[theirs], kind="stable")]
        self._group = student.group
        self._sent = np.bincount(receiver[mine], minlength=ranks).tolist()
        self._received = np.bincount(sender[theirs], minlength=ranks).tolist()
        self._of_student = upload(of_student[outgoing] - student.start, device)
        self._of_teacher = upload(of_teacher[incoming] - teacher.start, device)
        others = [
            np.setdiff1d(np.arange(part.size), ids) for part, ids in ((student, of_student), (teacher, of_teacher))
        ]
        self.left = len(others[0]), len(others[1])
        self.left_widths = [
            np.bincount(part.owner(ids), minlength=ranks).tolist()
            for part, ids in zip((student, teacher), others, strict=True)
        ]
        self._left_of_student = upload(student.here(others[0]), device)
        self._left_of_teacher = upload(teacher.here(others[1]), device)

    def paired(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[C, n]`` each, the common columns that this rank has of the teacher, from all local columns."""
        sent = student.index_select(1, self._of_student).t()
        found = exchange(sent, self._sent, self._received, self._group).t()
        return found, teacher.index_select(1, self._of_teacher)

    def unpaired(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the local columns ``[C, n]`` of either side that the other does not have."""
        return student.index_select(1, self._left_of_student), teacher.index_select(1, self._left_of_teacher)
