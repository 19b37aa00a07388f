"""The vocabulary head with a loss that is known beforehand: its gradients are formed while a chunk's logits exist.

Three products of ``[R, h]`` and ``[Vl, h]``, as with stored logits, and backward only scales the gradients of forward:

- :func:`head_weighted_sum`, linear in the log-probabilities with known weights, for example supervised training;
- :func:`head_edge_loss`, a sum of terms that each read the edges and entropies of one row, for example a policy
  gradient with a ratio per token, or of the rows that are scored together, for example a preference: a row's gradient
  follows from the chunk in which the last of these is. Only logits of rows that are scored together with one of a later
  chunk are computed again;
- :func:`head_logit_losses`, a sum of terms that each read all logits of one row, for example a divergence from a
  teacher's.

Legend: P padded tokens, E edges, R rows (predictors with an edge), C rows of a chunk, h hidden size, Vl local columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.edges import Edges, wide
from mcore_prefix_tree.logprob.head import add_gradients, check_shapes
from mcore_prefix_tree.logprob.head_chunks import Chunks, Grads, Head
from mcore_prefix_tree.logprob.softmax import BlockSoftmax, LogitGrads, RowSums, over_ranks, sum_per_row

# Of the log-probabilities [E] of all edges and the entropies [R] of all rows, if asked for: a scalar.
EdgeLoss = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

# Of a chunk's rows and their logits [C, Vl]: the values [C]. It turns the logits into the gradient of the loss at them.
LogitLoss = Callable[[slice, torch.Tensor], torch.Tensor]

# Gradients [E] and [R] of the inputs of an EdgeLoss; None for entropies that the loss does not read.
_RowGrads = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]


def head_weighted_sum(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, edge_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum_e edge_weight[e] log p(e)``: three products instead of the four of :func:`head_logprobs`.

    Forward keeps the gradient of ``weight`` in fp32 until backward; it can be taken once. Without gradients it keeps
    nothing. ``edge_weight`` is ``[E]``, without gradient; the others are those of :func:`head_logprobs`.

    Returns:
        Scalar, fp32 or better, equal on all ranks of the group; and the log-probabilities ``[P]`` that it sums, as in
        :func:`head_logprobs`, without a gradient.

    Raises:
        ValueError: same cases as in :func:`head_logprobs`; or float16, which underflows in gradients formed before the
            loss is scaled.
    """
    total, per_edge, _ = _weighted_sum(hidden, weight, head, edge_weight.to(wide(hidden.dtype)))
    return total, head.edges.at_tokens(per_edge)


def head_weighted_hits(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, edge_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`head_weighted_sum`, and the weights ``[]`` of the edges to their predictors' likeliest tokens."""
    edge_weight = edge_weight.to(wide(hidden.dtype))
    total, per_edge, likeliest = _weighted_sum(hidden, weight, head, edge_weight)
    return total, torch.dot(edge_weight, (per_edge == likeliest[head.edges.row_of_edge]).to(edge_weight.dtype))


def _weighted_sum(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, edge_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum, and the log-probabilities ``[E]`` of the edges and ``[R]`` of the likeliest tokens."""
    gradient, per_edge, _, likeliest = _with_gradient(
        hidden, weight, head, lambda *_: (edge_weight, None), by_rows=True, with_entropy=False
    )
    return torch.dot(edge_weight, per_edge) + gradient, per_edge, likeliest


def head_edge_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    head: Head,
    *,
    loss: EdgeLoss,
    by_rows: bool = False,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradient of a known loss, in three products if one chunk has all rows that a term reads.

    Memory, use and errors are those of :func:`head_weighted_sum`.

    Args:
        hidden, weight, head: ``[R, h]``, ``[Vl, h]``, as in :func:`head_logprobs`.
        loss: function of the log-probabilities ``[E]`` and, ``with_entropy``, the entropies ``[R]``: a sum of terms,
            each of which reads rows that are scored together, see :class:`Edges`. It is called once per chunk and once
            more at the end, and not at all without gradients. Only its results for rows with complete terms are used;
            rows that are still to come have a uniform distribution. It is the same on all ranks of the group.
        by_rows: whether each term reads the edges and the entropy of one row.

    Returns:
        A scalar 0 whose gradients are those of the loss, to be added to its value; and the log-probabilities ``[E]``
        and the entropies ``[R]`` or None to compute that value from, fp32 or better, without gradients and equal on all
        ranks of the group.
    """

    def row_grads(logprob: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss's gradients ``[E]`` and ``[R]`` or None."""
        leaves = [leaf.detach().requires_grad_() for leaf in (logprob, entropy) if leaf is not None]
        with torch.enable_grad():
            total = loss(leaves[0], leaves[1] if with_entropy else None)
        of_logprob, *of_entropy = torch.autograd.grad(total, leaves, allow_unused=True)
        if of_logprob is None:
            of_logprob = torch.zeros_like(logprob)
        return of_logprob, of_entropy[0] if of_entropy else None

    return _with_gradient(hidden, weight, head, row_grads, by_rows=by_rows, with_entropy=with_entropy)[:3]


def head_logit_losses(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, loss: LogitLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a loss that sums over rows and reads each row completely.

    Memory, use and errors are those of :func:`head_weighted_sum`.

    Args:
        hidden, weight, head: ``[R, h]``, ``[Vl, h]``, as in :func:`head_logprobs`; only the rows of the edges are read.
        loss: function called once per chunk, with and without gradients. The logits are in fp32 or wider and divided by
            the temperature; each rank of the group has its columns, and ranks call it together.

    Returns:
        A scalar 0 whose gradients are those of the loss, to be added to its value; and the values ``[R]``, without
        gradients.
    """
    with_grad = forms_gradient(hidden, weight, head)
    found: tuple[torch.Tensor, torch.Tensor] = _HeadLogitLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, head, loss, with_grad
    )
    return found


def _with_gradient(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, row_grads: _RowGrads, *, by_rows: bool, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the outputs of :class:`_HeadEdgeLoss` for ``[R, h]`` and ``[Vl, h]``."""
    with_grad = forms_gradient(hidden, weight, head)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor] = _HeadEdgeLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, head, row_grads, by_rows, with_entropy, with_grad
    )
    return found


def forms_gradient(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> bool:
    """Return whether forward forms a gradient of ``[R, h]`` or ``[Vl, h]``; check that it can."""
    check_shapes(hidden, weight, head)
    if hidden.dtype == torch.float16:
        raise ValueError("gradients that are formed before the loss is scaled vanish in float16; use bfloat16")
    return torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


class _HeadEdgeLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        head: Head,
        row_grads: _RowGrads,
        by_rows: bool,
        with_entropy: bool,
        with_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return 0, log-probabilities ``[E]``, entropies ``[R]`` or None, and the likeliest tokens' ``[R]``.

        Hidden states are ``[R, h]``, the weight ``[Vl, h]``.
        """
        chunks = Chunks(hidden, weight, head)
        of_hidden, of_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grads = Grads(chunks, of_hidden=of_hidden, of_weight=of_weight)
        scores = _Scores(chunks, with_entropy=with_entropy)
        logprob, entropy, sums = scores.logprob, scores.entropy, scores.sums
        waiting = None if by_rows or not with_grad else _Waiting(head.edges)
        for rows, edges in chunks:
            softmax = scores.add(rows, edges)
            settled = rows if waiting is None else waiting.settled(rows)
            if not with_grad or settled.start == settled.stop:
                continue
            grad_logprob, grad_entropy = row_grads(logprob, entropy)
            if waiting is not None:
                grad_logprob, grad_entropy = waiting.only_settled(settled, grad_logprob, grad_entropy)
            here = slice(settled.start - rows.start, settled.stop - rows.start)
            edge_grads = chunks.edge_grads(settled, head.edges.of_rows(settled), grad_logprob)
            joined = sums[settled]
            of_outputs = LogitGrads(
                row=sum_per_row(grad_logprob[head.edges.of_rows(settled)], edge_grads.row, joined.total),
                entropy=None if grad_entropy is None else grad_entropy[settled],
                edges=edge_grads,
            )
            out = chunks.gradient_memory(settled.stop - settled.start)
            grad = softmax.gradient(here, joined, of_outputs, out=out)
            grads.add_(settled, grad)
        if waiting is not None and waiting.rows.any():
            waiting.add_gradients(chunks, grads, sums, *row_grads(logprob, entropy))
        keep(ctx, grads, head, weight.dtype)
        likeliest = -sums.total.log()
        ctx.mark_non_differentiable(*(values for values in (logprob, entropy, likeliest) if values is not None))
        return logprob.new_zeros(()), logprob, entropy, likeliest

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *kept(ctx, grad_outputs[0]), None, None, None, None, None


class _Scores:
    """Inputs of a loss of edges ``[E]``, and ``[R]``, filled one chunk at a time; uniform for later chunks."""

    def __init__(self, chunks: Chunks, *, with_entropy: bool) -> None:
        head, rows = chunks.head, len(chunks.hidden)
        columns = len(chunks.weight) * (1 if head.group is None else dist.get_world_size(head.group))
        uniform = math.log(head.vocab_size or columns)
        self._chunks = chunks
        self.logprob = chunks.hidden.new_full((len(head.edges.token_id),), -uniform, dtype=chunks.dtype)
        self.entropy = self.logprob.new_full((rows,), uniform) if with_entropy else None
        self.sums = RowSums.empty(rows, with_entropy=with_entropy, like=self.logprob)

    def add(self, rows: slice, edges: slice) -> BlockSoftmax:
        """Score a chunk, and return its softmax."""
        head = self._chunks.head
        products = self._chunks.products(rows)
        target = self._chunks.target(rows, edges, products)
        softmax = self._chunks.softmax(rows, products, with_entropy=self.entropy is not None)
        self.sums[rows].set(over_ranks(softmax.sums, head.group))
        if head.group is not None:
            dist.all_reduce(target, group=head.group)
        self.logprob[edges] = self.sums[head.edges.row_of_edge[edges]].logprob(target)
        if self.entropy is not None:
            of_rows = self.sums[rows].entropy
            assert of_rows is not None
            self.entropy[rows] = of_rows
        return softmax


class _HeadLogitLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: Head, loss: LogitLoss, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 0 and the values ``[R]`` for hidden states ``[R, h]`` and weight ``[Vl, h]``."""
        chunks = Chunks(hidden, weight, head)
        of_hidden, of_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grads = Grads(chunks, of_hidden=of_hidden, of_weight=of_weight)
        values = hidden.new_empty(len(hidden), dtype=chunks.dtype)
        for rows, _ in chunks:
            logits = chunks.logits(rows)
            values[rows] = loss(rows, logits)
            if with_grad:
                grads.add_(rows, chunks.scaled_(rows, logits))
        keep(ctx, grads, head, weight.dtype)
        ctx.mark_non_differentiable(values)
        return values.new_zeros(()), values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *kept(ctx, grad_outputs[0]), None, None, None


class _Waiting:
    """The rows, bool ``[R]`` on the host, that are scored together with one of a later chunk."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self.rows = np.zeros(len(edges.host_row), dtype=np.bool_)
        self._rows = torch.zeros_like(edges.settled_by, dtype=torch.bool)  # the same on the device, which is not asked

    def settled(self, rows: slice) -> slice:
        """Return the rows of a chunk from the first to the last that need not wait."""
        self.rows[rows] = self._edges.host_settled_by[rows] >= rows.stop
        self._rows[rows] = self._edges.settled_by[rows] >= rows.stop
        settled = np.flatnonzero(~self.rows[rows])
        if not len(settled):
            return slice(rows.start, rows.start)
        return slice(rows.start + int(settled[0]), rows.start + int(settled[-1]) + 1)

    def only_settled(
        self, rows: slice, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients ``[E]`` and ``[R]`` without those of waiting rows among these; others are not read."""
        if not self.rows[rows].any():
            return grad_logprob, grad_entropy
        grad_logprob = grad_logprob.masked_fill(self._rows[self._edges.row_of_edge], 0)
        return grad_logprob, None if grad_entropy is None else grad_entropy.masked_fill(self._rows, 0)

    def add_gradients(
        self, chunks: Chunks, grads: Grads, sums: RowSums, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> None:
        """Add the gradients of these rows, ``[E]`` and ``[R]``, once everything is known; see :func:`add_gradients`."""
        edges, rows, of_edge = self._edges.some_rows(self.rows, self._rows)
        later = Chunks(chunks.hidden[rows], chunks.weight, replace(chunks.head, edges=edges), like=chunks)
        own = Grads(later, of_hidden=grads.hidden is not None, of_weight=False, weight_grad=grads.weight)
        own_entropy = None if grad_entropy is None else grad_entropy[rows]
        add_gradients(later, own, sums[rows], grad_logprob[of_edge], own_entropy)
        if grads.hidden is not None:
            assert own.hidden is not None
            grads.hidden.index_copy_(0, rows, own.hidden)


def keep(ctx: Any, grads: Grads, head: Head, weight_dtype: torch.dtype) -> None:
    """Keep the gradients that forward has formed for backward."""
    ctx.save_for_backward(grads.hidden, grads.weight)
    ctx.head, ctx.weight_dtype = head, weight_dtype


def kept(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the kept gradients ``[R, h]`` and ``[Vl, h]``, times the gradient of the loss ``[]``."""
    grad_hidden, grad_weight = ctx.saved_tensors
    head: Head = ctx.head
    if grad_hidden is not None:
        grad_hidden = (grad_hidden * scale).to(grad_hidden.dtype)
    if grad_weight is not None:
        grad_weight = grad_weight.mul_(scale)
        if head.weight_grad is not None:
            head.weight_grad.buffer().add_(grad_weight)
            grad_weight = head.weight_grad.placeholder()
    return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.weight_dtype)
