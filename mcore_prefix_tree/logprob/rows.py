"""The softmax of a block of rows of logits, forward and backward, each step overwriting the block it is given.

Shared by the paths with and without logits: what one computes for a row, the other computes in the same operations.

Legend: B rows of the block, Vl columns on this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class LogitShape:
    """What stands between the product ``hidden @ weight.T`` and the softmax, besides the temperature.

    ``logits = softcap * tanh(multiplier * product / softcap)``.

    Attributes:
        multiplier: as of muP, https://arxiv.org/abs/2203.03466.
        softcap: None leaves the logits uncapped; as of Gemma 2, https://arxiv.org/abs/2408.00118.
    """

    multiplier: float = 1.0
    softcap: float | None = None

    def apply_(self, block: torch.Tensor) -> torch.Tensor:
        """Products to logits, in place."""
        if self.multiplier != 1.0:
            block.mul_(self.multiplier)
        if self.softcap is not None:
            block.div_(self.softcap).tanh_().mul_(self.softcap)
        return block

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """``[B, Vl]``, the derivative of the logits by the uncapped ones, from the logits; None where it is 1."""
        return None if self.softcap is None else 1 - (logits / self.softcap).square_()

    def backward_(self, grad: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the logits to that of the products, in place."""
        if slope is not None:
            grad.mul_(slope)
        if self.multiplier != 1.0:
            grad.mul_(self.multiplier)
        return grad


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """What is known of each row's softmax, all ``[B]`` or ``[R]``.

    Attributes:
        logsumexp: of the logits.
        entropy: of the softmax in nats, if asked for.
    """

    logsumexp: torch.Tensor
    entropy: torch.Tensor | None

    @classmethod
    def empty(cls, count: int, *, with_entropy: bool, like: torch.Tensor) -> RowSums:
        """To be filled block by block."""
        logsumexp = like.new_empty(count)
        return cls(logsumexp=logsumexp, entropy=torch.empty_like(logsumexp) if with_entropy else None)

    def __getitem__(self, rows: slice) -> RowSums:
        """Views of some rows."""
        return RowSums(logsumexp=self.logsumexp[rows], entropy=None if self.entropy is None else self.entropy[rows])

    def set(self, other: RowSums) -> None:
        """Overwrite with another's."""
        self.logsumexp.copy_(other.logsumexp)
        if self.entropy is not None:
            assert other.entropy is not None
            self.entropy.copy_(other.entropy)


def softmax_sums_(block: torch.Tensor, *, shifted: torch.Tensor | None = None) -> tuple[RowSums, torch.Tensor]:
    """The sums of this rank's columns, and each row's largest logit ``[B]``.

    Args:
        block: ``[B, Vl]``, logits; left with ``exp(block - largest)``.
        shifted: memory of the same size, left with ``block - largest``; without it there is no entropy.
    """
    largest = block.amax(dim=1)
    if shifted is None:
        exp = block.sub_(largest[:, None]).exp_()
    else:
        exp = torch.exp(torch.sub(block, largest[:, None], out=shifted), out=block)
    total = exp.sum(dim=1)
    log_total = total.log()
    # Relative to the maximum, not to the logsumexp: a near-certain row keeps the digits of its entropy.
    entropy = None if shifted is None else log_total - torch.linalg.vecdot(exp, shifted) / total
    return RowSums(logsumexp=largest + log_total, entropy=entropy), largest


def over_ranks(sums: RowSums, group: dist.ProcessGroup | None) -> RowSums:
    """Join what each rank of the group knows of its own columns.

    Rank r holds the share ``w_r = exp(logsumexp_r - logsumexp)`` of a row's probability, and the row's entropy is
    ``sum_r w_r (H_r + logsumexp - logsumexp_r)``.
    """
    if group is None:
        return sums
    largest = sums.logsumexp.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    relative = sums.logsumexp - largest
    share = relative.exp()
    total = share.clone()
    # One reduction for each: the bits of the log-probabilities do not depend on whether the entropy is asked for.
    dist.all_reduce(total, group=group)
    log_total = total.log()
    if sums.entropy is None:
        return RowSums(logsumexp=largest + log_total, entropy=None)
    weighted = share * (sums.entropy - relative)
    dist.all_reduce(weighted, group=group)
    return RowSums(logsumexp=largest + log_total, entropy=weighted / total + log_total)


@dataclass(frozen=True, kw_only=True)
class EdgeGrads:
    """Gradients of some edges' log-probabilities, ``[E]``, and where each edge's token stands on this rank.

    Attributes:
        row: int64, the row of each edge in the block.
        column: int64, of its token; anything where that is on another rank.
        grad: the gradient; 0 where the token is on another rank.
    """

    row: torch.Tensor
    column: torch.Tensor
    grad: torch.Tensor

    def add_to_(self, block: torch.Tensor) -> None:
        """Add each gradient at its token; several edges may share one."""
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
    """Logits to their gradient, in place.

    Args:
        block: ``[B, Vl]``, logits.
        sums: of the rows, over all ranks.
        grad_row: ``[B]``, the sum of the gradients of all edges of a row, on whatever rank their tokens are; None if
            nobody uses the log-probabilities.
        grad_entropy: ``[B]``, of the rows' entropies; None if nobody uses them.
        edges: of the block; None as ``grad_row`` is.
    """
    log_prob = block.sub_(sums.logsumexp[:, None])
    if grad_entropy is None:
        assert grad_row is not None
        log_prob.exp_().mul_(-grad_row[:, None])
    else:
        assert sums.entropy is not None
        weight = (log_prob + sums.entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_row is not None:
            weight.sub_(grad_row[:, None])
        log_prob.exp_().mul_(weight)
    if edges is not None:
        edges.add_to_(block)
    return block
