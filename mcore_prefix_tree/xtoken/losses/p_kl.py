"""P-KL: the student's distribution projected onto the teacher's vocabulary, against the teacher's likeliest columns.

With K the columns, W the projection, S the chunk's predictors in the student and U those in the teacher:

    Q = mean over S of (softmax(x) W)[K]      a = log(Q / sum Q)
    b = mean over U of log softmax(z[K])      sum e^b (b - a), or in reverse sum e^a (a - b)

If the teacher is rows of its likeliest tokens, K differs per chunk: the tokens that the rows of all its predictors
name. A chunk without any has the term 0.

The mean is taken before projecting, which is linear, so a chunk is projected once. Each rank multiplies its columns by
their rows of W; products for columns of K that another rank has of the teacher are sent to that rank.

Legend: C chunks, Vl and Wl columns on this rank, K_r columns of K on rank r.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.xtoken.losses.chunk_loss import FLOOR, Vocabularies, kl
from mcore_prefix_tree.xtoken.losses.collectives import Group, group_rank, group_size, log_softmax, sum_over
from mcore_prefix_tree.xtoken.losses.common_columns import Part
from mcore_prefix_tree.xtoken.losses.row_blocks import Block, BlockSide

Int64Array = npt.NDArray[np.int64]


class ProjectedKL:
    """P-KL over ``columns``, ascending int64 ids ``[K]`` of the teacher's vocabulary, or None for all.

    With ``named``, the teacher's logits are -inf except for the tokens that a row names.
    """

    def __init__(
        self, vocabularies: Vocabularies, columns: Int64Array | None, *, reverse: bool = False, named: bool = False
    ) -> None:
        self._group, self._reverse, self._named = vocabularies.group, reverse, named
        chosen = np.arange(vocabularies.teacher.size) if columns is None else columns
        self._own_columns = upload(vocabularies.teacher.here(chosen), vocabularies.device)
        self._matrices = _matrices(vocabularies, chosen)

    def shares(self, student: torch.Tensor, teacher: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the terms' shares ``[C]`` from logits ``[A, Vl]`` and ``[B, Wl]``; see :meth:`ChunkLoss.shares`."""
        mean = block.student.mean(log_softmax(student, self._group).exp())
        if self._matrices[0].onto.dtype != mean.dtype:
            self._matrices = [matrix.to(mean.dtype) for matrix in self._matrices]
        projected: torch.Tensor = _Projected.apply(mean, self._matrices, self._group)  # type: ignore[no-untyped-call]
        logits = teacher.index_select(1, self._own_columns)
        if self._named:
            common, target = self._of_named(logits, block.teacher)
            projected = projected.where(common, 0)
        else:
            target = block.teacher.mean(log_softmax(logits, self._group))
        total = sum_over(projected.sum(dim=1), self._group).clamp(min=FLOOR)
        model = (projected / total[:, None]).clamp(min=FLOOR).log()
        if self._named:
            model = model.where(common, 0)  # like the target there: a term of 0
        return kl(target, model, reverse=self._reverse)

    def _of_named(self, logits: torch.Tensor, side: BlockSide) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool ``[C, K_r]``, the columns that all rows of a chunk name, and b ``[C, K_r]``, 0 in the others."""
        common = side.mean(logits.isinf().to(logits.dtype)) == 0
        other = ~common[side.chunk]
        logprobs = log_softmax(logits[side.row].masked_fill(other, -torch.inf), self._group).masked_fill(other, 0)
        each = torch.arange(len(side.row), device=logits.device)
        shares = logits.new_zeros(len(common), len(each)).index_put((side.chunk, each), side.share.to(logits.dtype))
        return common, shares @ logprobs


def top_columns(maxima: torch.Tensor, k: int, part: Part) -> Int64Array:
    """Return the ids of the k columns with the largest logit, ascending; among equal logits the lowest ids.

    ``maxima`` is ``[Wl]``, the largest logit of each of this rank's columns after any predictor of the step.
    """
    values, order = maxima.sort(descending=True, stable=True)
    values, ids = values[:k], order[:k] + part.start
    if part.group is not None:
        # Padded to one size; the padding is never among the largest.
        room = min(k, max(np.diff(part.borders)))
        values = torch.nn.functional.pad(values, (0, room - len(values)), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, room - len(ids)), value=part.size)
        joined = []
        for own in (values, ids):
            parts = [torch.empty_like(own) for _ in range(group_size(part.group))]
            dist.all_gather(parts, own.contiguous(), group=part.group)
            joined.append(torch.cat(parts))
        # Ranks come in the order of their columns, so a stable sort keeps the lowest ids first here too.
        ids = joined[1][joined[0].sort(descending=True, stable=True).indices[:k]]
    chosen: Int64Array = np.sort(ids.cpu().numpy())
    return chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class _Matrix:
    """The part of W from this rank's columns to one rank's columns of K: sparse ``[K_r, Vl]`` and ``[Vl, K_r]``."""

    onto: torch.Tensor
    back: torch.Tensor

    def to(self, dtype: torch.dtype) -> _Matrix:
        return _Matrix(onto=self.onto.to(dtype), back=self.back.to(dtype))


def _matrices(vocabularies: Vocabularies, chosen: Int64Array) -> list[_Matrix]:
    """Return the parts of W for every rank that has columns of K, from ascending int64 ids ``[K]``."""
    student, teacher, projection = vocabularies.student, vocabularies.teacher, vocabularies.projection
    assert projection is not None, "P-KL reads a projection"
    place = np.full(teacher.size, -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    columns = projection.columns[student.start : student.stop].astype(np.int64)
    row, slot = np.nonzero(columns >= 0)
    at = place[columns[row, slot]]
    weight = projection.weights[student.start : student.stop][row, slot]
    owner = teacher.owner(chosen)
    firsts = np.searchsorted(owner, np.arange(group_size(vocabularies.group) + 1))
    made = []
    for first, stop in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        mine = (at >= first) & (at < stop)
        entries = upload(np.stack([at[mine] - first, row[mine]]), vocabularies.device)
        values = upload(weight[mine], vocabularies.device)
        size = (stop - first, student.width)
        made.append(
            _Matrix(onto=_compressed(entries, values, size), back=_compressed(entries.flip(0), values, size[::-1]))
        )
    return made


def _compressed(entries: torch.Tensor, values: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Return a sparse matrix of ``size`` from int64 ``[2, E]`` places and their ``[E]`` values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_coo_tensor(entries, values, size, check_invariants=False).coalesce().to_sparse_csr()


class _Projected(torch.autograd.Function):
    """Multiply ``[C, Vl]`` by W; every rank gets the sums over ranks of its own columns of K, ``[C, K_r]``."""

    @staticmethod
    def forward(ctx: Any, mean: torch.Tensor, matrices: Sequence[_Matrix], group: Group) -> torch.Tensor:
        ctx.matrices, ctx.group = matrices, group
        found = mean.new_empty(0)
        # One owner at a time: no rank holds the columns of all.
        for rank, matrix in enumerate(matrices):
            part = _product(matrix.onto, mean.t())
            if group is not None:
                dist.reduce(part, dist.get_global_rank(group, rank), group=group)
            if rank == group_rank(group):
                found = part.t()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), group = grads, ctx.group
        total: torch.Tensor | None = None
        for rank, matrix in enumerate(ctx.matrices):
            own = rank == group_rank(group)
            part = grad.t().contiguous() if own else grad.new_empty(len(matrix.onto), len(grad))
            if group is not None:
                dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
            back = _product(matrix.back, part)
            total = back if total is None else total.add_(back)
        assert total is not None
        return total.t(), None, None


def _product(matrix: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Return a sparse matrix ``[m, n]`` times a dense one ``[n, C]``."""
    if not matrix.shape[0] or not matrix.shape[1]:
        return dense.new_zeros(matrix.shape[0], dense.shape[1])
    product: torch.Tensor = torch.sparse.mm(matrix, dense.contiguous())
    return product
