"""The vocabulary head fused with the edges' log-probabilities: logits exist for a chunk of rows at a time.

Only predictors that have an edge are projected. What a logit's gradient will be multiplied with is not known in
advance, so :func:`head_logprobs` computes the logits of a chunk again in backward: four products of ``[R, h]`` and
``[Vl, h]`` instead of three. Where the loss is linear in the log-probabilities with known weights, as in supervised
training, :func:`head_weighted_sum` forms the gradients while it has the logits: three products, as with stored logits.

The gradients of both outputs are in :mod:`mcore_prefix_tree.logprob.edges`; those of hidden states and weight follow
from ``logits = hidden @ weight.T``.

Legend: P padded tokens, E edges, R rows (predictors with an edge), C rows of a chunk, h hidden size, Vl columns of the
vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.edges import Edges, slices, wide
from mcore_prefix_tree.logprob.rows import (
    EdgeGrads,
    LogitShape,
    RowSums,
    over_ranks,
    softmax_backward_,
    softmax_sums_,
    sum_per_row,
)

# Logits of a chunk, and the rows that it has at least: a chunk costs a pass over the weight and over the sum of its
# gradient, which few rows do not pay for. Measured for a processor, whose caches like chunks small; for a GPU derived
# from the ratio of its arithmetic to its memory bandwidth.
_CPU = (2**23, 256)
_GPU = (2**28, 2048)


def chunk_rows(columns: int, device: torch.device) -> int:
    """C for so many columns of logits on this rank."""
    logits, least_rows = _CPU if device.type == "cpu" else _GPU
    return max(least_rows, logits // columns)


class WeightGradSink(Protocol):
    """Takes the weight's gradient in place of autograd, as Megatron's gradient accumulation fusion does."""

    def buffer(self) -> torch.Tensor:
        """``[Vl, h]``, fp32 or the weight's dtype, to add to."""

    def placeholder(self) -> torch.Tensor | None:
        """What autograd is given; called once the gradient has been added."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """What a row's logits are made of, besides hidden states and weight.

    Attributes:
        edges: that are scored.
        shape: what the model does to its logits.
        temperature: ``[P]``, by predictor; None is 1.
        vocab_start: id of this rank's first column.
        group: tensor-parallel group over which the vocabulary is split, None if it is not.
        rows_at_a_time: C; :func:`chunk_rows` if None.
        weight_grad: where the weight's gradient goes; None leaves it to autograd.
    """

    edges: Edges
    shape: LogitShape = field(default_factory=LogitShape)
    temperature: torch.Tensor | None = None
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None
    rows_at_a_time: int | None = None
    weight_grad: WeightGradSink | None = None


def head_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of every scored token given its path.

    Args:
        hidden: ``[R, h]``, the hidden states of ``head.edges.row``, the same on all ranks of the group.
        weight: ``[Vl, h]``, this rank's part of the output weight.
        head: the rest.
        with_entropy: compute it too.

    Returns:
        ``[P]`` in nats, fp32 or better, at each token's own flat index, 0 for tokens without an edge; and the entropies
        ``[P]`` of the predictors, 0 where they have no edge, or None. Both are equal on all ranks of the group. The
        gradient of ``hidden`` is this rank's part: its sum over the group is the caller's.

    Raises:
        ValueError: if ``hidden`` does not have a row for every predictor or ``weight`` is not ``[Vl, h]``.
    """
    _check(hidden, weight, head)
    per_edge, entropy = _HeadLogprobs.apply(hidden, weight, head, with_entropy)  # type: ignore[no-untyped-call]
    return head.edges.at_tokens(per_edge), None if entropy is None else head.edges.at_rows(entropy)


def head_candidate_logprobs(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
    """As :func:`head_logprobs`, edge by edge: ``[E]``."""
    _check(hidden, weight, head)
    per_edge: torch.Tensor = _HeadLogprobs.apply(hidden, weight, head, False)[0]  # type: ignore[no-untyped-call]
    return per_edge


def head_weighted_sum(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, edge_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum_e edge_weight[e] log p(e)``: three products instead of the four of :func:`head_logprobs`.

    Forward keeps the gradient of ``weight`` in fp32 until backward; it can be taken once. Without gradients it keeps
    nothing.

    Args:
        hidden: as there.
        weight: as there.
        head: as there.
        edge_weight: ``[E]``, without gradient.

    Returns:
        Scalar, fp32 or better, equal on all ranks of the group; and what it sums, the log-probabilities ``[P]`` as
        there, without a gradient.

    Raises:
        ValueError: as there; or for float16, where gradients that are formed before the loss is scaled vanish.
    """
    _check(hidden, weight, head)
    if hidden.dtype == torch.float16:
        raise ValueError(
            "the weighted sum forms gradients before the loss is scaled, which float16 needs; use bfloat16"
        )
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, per_edge = _HeadWeightedSum.apply(  # type: ignore[no-untyped-call]
        hidden, weight, head, edge_weight.to(wide(hidden.dtype)), with_grad
    )
    return total, head.edges.at_tokens(per_edge)


def _check(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> None:
    rows = len(head.edges.host_row)
    if hidden.ndim != 2 or len(hidden) != rows:
        raise ValueError(f"hidden must be [{rows}, h], a row for every predictor, not {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight must be [vocabulary, {hidden.shape[1]}], not {list(weight.shape)}")


class _Chunks:
    """The logits of ``hidden @ weight.T`` a chunk of rows at a time."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> None:
        self.hidden, self.weight, self.head = hidden, weight, head
        self.dtype = wide(hidden.dtype)
        self.rows_at_a_time = head.rows_at_a_time or chunk_rows(len(weight), weight.device)
        here, self.column = head.edges.column(head.vocab_start, len(weight))
        self.here = here
        self.temperature = None if head.temperature is None else head.temperature[head.edges.row].to(self.dtype)
        # One allocation for all chunks: fresh memory costs a processor more than the softmax does.
        size = (min(self.rows_at_a_time, len(hidden)), len(weight))
        self._product = hidden.new_empty(size)
        self._logits = (
            self._product if hidden.dtype == self.dtype else torch.empty_like(self._product, dtype=self.dtype)
        )

    def __iter__(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Rows, their edges, and their logits ``[C, Vl]`` in fp32 or wider, to be overwritten."""
        for rows in slices(len(self.hidden), self.rows_at_a_time):
            product = self._product[: rows.stop - rows.start]
            logits = self._logits[: rows.stop - rows.start]
            torch.mm(self.hidden[rows], self.weight.t(), out=product)
            if logits is not product:
                logits.copy_(product)
            self.head.shape.apply_(logits)
            if self.temperature is not None:
                logits.div_(self.temperature[rows, None])
            yield rows, self.head.edges.of_rows(rows), logits

    def target(self, rows: slice, edges: slice, logits: torch.Tensor) -> torch.Tensor:
        """Logit of each edge's token; 0 where that is on another rank."""
        own_row = self.head.edges.row_of_edge[edges] - rows.start
        return torch.where(self.here[edges], logits[own_row, self.column[edges]], 0)

    def edge_grads(self, rows: slice, edges: slice, grad: torch.Tensor) -> EdgeGrads:
        """Of gradients ``[E]`` of all edges."""
        return EdgeGrads(
            row=self.head.edges.row_of_edge[edges] - rows.start,
            column=self.column[edges],
            grad=torch.where(self.here[edges], grad[edges], 0),
        )

    def slope(self, rows: slice, logits: torch.Tensor) -> torch.Tensor | None:
        """See :meth:`LogitShape.slope`."""
        if self.head.shape.softcap is None or self.temperature is None:
            return self.head.shape.slope(logits)
        return self.head.shape.slope(logits * self.temperature[rows, None])


class _Grads:
    """Gradients of hidden states and weight, from those of the logits a chunk at a time."""

    def __init__(self, chunks: _Chunks, *, of_hidden: bool, of_weight: bool, weight_grad: torch.Tensor | None = None):
        self._chunks = chunks
        self.hidden = torch.empty_like(chunks.hidden) if of_hidden else None
        self.weight = weight_grad
        if of_weight and weight_grad is None:
            # In fp32 whatever the weight's dtype: it is a sum over chunks.
            self.weight = torch.zeros_like(chunks.weight, dtype=chunks.dtype)

    def add_(self, rows: slice, grad: torch.Tensor, slope: torch.Tensor | None) -> None:
        """Take the gradient of some rows' logits ``[C, Vl]``; overwrites it."""
        chunks = self._chunks
        if chunks.temperature is not None:
            grad.div_(chunks.temperature[rows, None])
        # Stock backward multiplies in the dtype of the weights too.
        grad = chunks.head.shape.backward_(grad, slope).to(chunks.hidden.dtype)
        if self.hidden is not None:
            torch.mm(grad, chunks.weight, out=self.hidden[rows])
        if self.weight is not None:
            if self.weight.dtype == grad.dtype:
                self.weight.addmm_(grad.t(), chunks.hidden[rows])
            else:
                self.weight.add_(grad.t() @ chunks.hidden[rows])


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: Head, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = _Chunks(hidden, weight, head)
        empty = hidden.new_empty(0, dtype=chunks.dtype)
        sums = RowSums.empty(len(hidden), with_entropy=with_entropy, like=empty)
        target = empty.new_empty(len(head.edges.token_id))
        for rows, edges, logits in chunks:
            target[edges] = chunks.target(rows, edges, logits)
            sums[rows].set(softmax_sums_(logits, with_entropy=with_entropy)[0])
        sums = over_ranks(sums, head.group)
        if head.group is not None:
            dist.all_reduce(target, group=head.group)
        ctx.save_for_backward(hidden, weight, sums.logsumexp, sums.entropy)
        ctx.set_materialize_grads(False)  # who does not use the entropies does not pay for their gradient
        ctx.head = head
        return target - sums.logsumexp[head.edges.row_of_edge], sums.entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprob, grad_entropy = grad_outputs
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, logsumexp, entropy = ctx.saved_tensors
        head: Head = ctx.head
        sums = RowSums(logsumexp=logsumexp, entropy=entropy)
        per_row = None if grad_logprob is None else sum_per_row(grad_logprob, head.edges.row_of_edge, logsumexp)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        sink = head.weight_grad if of_weight else None
        chunks = _Chunks(hidden, weight, head)
        grads = _Grads(
            chunks, of_hidden=of_hidden, of_weight=of_weight, weight_grad=None if sink is None else sink.buffer()
        )
        for rows, edges, logits in chunks:
            slope = chunks.slope(rows, logits)
            grad = softmax_backward_(
                logits,
                sums[rows],
                grad_row=None if per_row is None else per_row[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                edges=None if grad_logprob is None else chunks.edge_grads(rows, edges, grad_logprob),
            )
            grads.add_(rows, grad, slope)
        grad_weight = sink.placeholder() if sink is not None else grads.weight
        return grads.hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


class _HeadWeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: Head, edge_weight: torch.Tensor, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = _Chunks(hidden, weight, head)
        of_hidden, of_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grads = _Grads(chunks, of_hidden=of_hidden, of_weight=of_weight)
        per_row = edge_weight.new_zeros(len(hidden)).index_add_(0, head.edges.row_of_edge, edge_weight)
        logprob = edge_weight.new_empty(len(head.edges.token_id))
        for rows, edges, logits in chunks:
            target = chunks.target(rows, edges, logits)
            slope = chunks.slope(rows, logits) if with_grad else None
            sums, largest = softmax_sums_(logits, with_entropy=False)
            sums = over_ranks(sums, head.group)
            if head.group is not None:
                dist.all_reduce(target, group=head.group)
            logprob[edges] = target - sums.logsumexp[head.edges.row_of_edge[edges] - rows.start]
            if with_grad:
                # exp(logits - largest) is there already.
                factor = per_row[rows] * (largest - sums.logsumexp).exp()
                grad = logits.mul_(-factor[:, None])
                chunks.edge_grads(rows, edges, edge_weight).add_to_(grad)
                grads.add_(rows, grad, slope)
        ctx.save_for_backward(grads.hidden, grads.weight)
        ctx.head, ctx.weight_dtype = head, weight.dtype
        ctx.mark_non_differentiable(logprob)
        return torch.dot(edge_weight, logprob), logprob

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_total, _ = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        head: Head = ctx.head
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_total).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_total)
            if head.weight_grad is not None:
                head.weight_grad.buffer().add_(grad_weight)
                grad_weight = head.weight_grad.placeholder()
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.weight_dtype), None, None, None
