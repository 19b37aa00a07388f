"""The softmax of a block of rows of logits, forward and backward, each step overwriting its block.

Shared by the paths with and without logits, so that both compute a row in the same operations.

Legend: B rows of the block, R rows in all, E edges, Vl columns on this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Below it exp is 0 in every dtype: logits of -inf are taken for it where 0 * inf would be NaN.
_EXP_IS_ZERO = -1000.0


@dataclass(frozen=True)
class RowSums:
    """Sums over the columns of each row, ``[B]`` or ``[R]``: all inputs of a softmax except the logits.

    The sum of ``exp(logits)`` stays in two factors, ``exp(maximum) * total``. The logarithm of their product would be
    rounded at the size of the maximum, and every log-probability with it.

    Attributes:
        maximum: the largest logit.
        total: sum of ``exp(logits - maximum)``, at least 1 over all ranks.
        moment: sum of ``exp(logits - maximum) * (logits - maximum)``; None if no entropy is needed.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    moment: torch.Tensor | None

    @classmethod
    def empty(cls, *size: int, with_entropy: bool, like: torch.Tensor) -> RowSums:
        """Return uninitialised sums ``[*size]`` on the device of ``like``, ``[...]``."""
        return cls(like.new_empty(size), like.new_empty(size), like.new_empty(size) if with_entropy else None)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.maximum, self.total, self.moment

    def __getitem__(self, rows: Any) -> RowSums:
        """Return the sums of some rows; of a slice, as views."""
        return RowSums(self.maximum[rows], self.total[rows], None if self.moment is None else self.moment[rows])

    def set(self, other: RowSums) -> None:
        for own, new in zip(self.parts, other.parts, strict=True):
            if own is not None:
                assert new is not None
                own.copy_(new)

    def logprob(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, from logits ``[B]`` or ``[B, n]``."""
        maximum, log_total = self.maximum, self.total.log()
        if logits.ndim > maximum.ndim:
            maximum, log_total = maximum[..., None], log_total[..., None]
        return (logits - maximum) - log_total

    @property
    def entropy(self) -> torch.Tensor | None:
        """Entropies in nats, if they are asked for."""
        return None if self.moment is None else self.total.log() - self.moment / self.total


def softmax_sums_(block: torch.Tensor, *, shifted: torch.Tensor | None = None) -> RowSums:
    """Return the sums of this rank's columns.

    ``block``, logits ``[B, Vl]``, is left with ``exp(block - maximum)``, and ``shifted``, memory of the same size, with
    ``block - maximum``; without it there is no moment.
    """
    # A rank may have only logits of -inf, whose exponentials are 0 for any maximum.
    maximum = block.amax(dim=1).clamp_(min=torch.finfo(block.dtype).min)
    if shifted is None:
        return RowSums(maximum, block.sub_(maximum[:, None]).exp_().sum(dim=1), None)
    exp = torch.exp(torch.sub(block, maximum[:, None], out=shifted), out=block)
    moment = torch.linalg.vecdot(exp, shifted.clamp_(min=_EXP_IS_ZERO))
    return RowSums(maximum, exp.sum(dim=1), moment)


def over_ranks(sums: RowSums, group: dist.ProcessGroup | None) -> RowSums:
    """Join the sums of the ranks, each over the columns of that rank, over the group."""
    if group is None:
        return sums
    maximum = sums.maximum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shift = sums.maximum - maximum
    total = sums.total * shift.exp()
    # One reduction for each: the bits of the log-probabilities do not depend on whether the entropy is asked for.
    moment = None if sums.moment is None else (sums.moment + shift * sums.total) * shift.exp()
    for part in (total, moment):
        if part is not None:
            dist.all_reduce(part, group=group)
    return RowSums(maximum, total, moment)


@dataclass(frozen=True, kw_only=True)
class EdgeGrads:
    """Gradients of some edges' log-probabilities, ``[E]``; 0, at any column, for tokens on another rank.

    ``row`` and ``column``, int64 ``[E]``, are the places of each edge's token in the block.
    """

    row: torch.Tensor
    column: torch.Tensor
    grad: torch.Tensor

    def add_to_(self, block: torch.Tensor) -> None:
        """Add each gradient at its token in ``[B, Vl]``; several edges may share one."""
        block.index_put_((self.row, self.column), self.grad, accumulate=True)


def sum_per_row(per_edge: torch.Tensor, row_of_edge: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[R]``, the sums of ``[E]`` over the edges of each row; ``like`` has the size."""
    return torch.zeros_like(like).index_add_(0, row_of_edge, per_edge)


def softmax_backward_(
    block: torch.Tensor,
    sums: RowSums,
    *,
    grad_row: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    edges: EdgeGrads | None,
) -> torch.Tensor:
    """Turn logits into their gradient, in place.

    Args:
        block: ``[B, Vl]``, logits.
        sums: sums of the rows, over all ranks.
        grad_row: ``[B]``, the sum of the gradients of all edges of a row, on all ranks; None, with ``edges``, if
            unused.
        grad_entropy: ``[B]``, gradients of the rows' entropies; None if unused.
    """
    shifted = block.sub_(sums.maximum[:, None])
    if grad_entropy is None:
        assert grad_row is not None
        shifted.exp_().mul_(-(grad_row / sums.total)[:, None])
    else:
        assert sums.moment is not None
        # log p + H, without the logarithm of the total that both have.
        weight = shifted.clamp_(min=_EXP_IS_ZERO) - (sums.moment / sums.total)[:, None]
        weight.mul_(-(grad_entropy / sums.total)[:, None])
        if grad_row is not None:
            weight.sub_((grad_row / sums.total)[:, None])
        shifted.exp_().mul_(weight)
    if edges is not None:
        edges.add_to_(block)
    return block
