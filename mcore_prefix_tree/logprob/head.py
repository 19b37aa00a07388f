"""The vocabulary head fused with the edges' log-probabilities: logits exist for a chunk of rows at a time.

Only predictors that have an edge are projected. The factor of a logit's gradient is not known before the loss is, so
backward computes the logits of a chunk again: four products of ``[R, h]`` and ``[Vl, h]`` instead of the three of
stored logits. :mod:`mcore_prefix_tree.logprob.head_losses` does without the fourth.

The gradients of both outputs are in :mod:`mcore_prefix_tree.logprob.edges`; those of hidden states and weight follow
from ``logits = hidden @ weight.T``.

Legend: P padded tokens, E edges, R rows (predictors with an edge), C rows of a chunk, h hidden size, Vl local columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.head_chunks import Chunks, Grads, Head
from mcore_prefix_tree.logprob.kept_logits import KeptScores, head_kept_logits, kept_scores
from mcore_prefix_tree.logprob.softmax import LogitGrads, RowSums, over_ranks, softmax_backward, sum_per_row


def head_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of every scored token given its path.

    Args:
        hidden: ``[R, h]``, the hidden states of ``head.edges.head_row``, the same on all ranks of the group; with D
            distributions over kept sets ``[R + D, h]``.
        weight: ``[Vl, h]``, this rank's part of the output weight.

    Returns:
        Log-probabilities ``[P + M]`` in nats, fp32 or better, at each token's flat index, 0 for tokens without an edge,
        and behind these those of the M kept edges; or ``[E]`` for edges to tokens that need not be in the layout; and
        the entropies ``[P + M]``, of the predictors, 0 if they have no edge, and of the kept edges, or None. Both
        are equal on all ranks of the group. The gradient of ``hidden`` is this rank's part: the caller sums it over the
        group.

    Raises:
        ValueError: if ``hidden`` does not have a row for every predictor or ``weight`` is not ``[Vl, h]``; a
            kept id is outside the vocabulary.
    """
    hidden, of_kept = split_kept(hidden, weight, head)
    if not head.edges.has_rows:
        assert of_kept is not None
        return head.edges.with_kept(of_kept, *head.edges.no_scores(of_kept.logprob, with_entropy=with_entropy))
    check_shapes(hidden, weight, head)
    per_edge, per_row = _HeadLogprobs.apply(hidden, weight, head, with_entropy)  # type: ignore[no-untyped-call]
    per_place, entropy = head.edges.placed(per_edge), None if per_row is None else head.edges.at_rows(per_row)
    return head.edges.with_kept(of_kept, per_place, entropy)


def split_kept(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> tuple[torch.Tensor, KeptScores | None]:
    """Return the hidden states ``[R, h]`` of ``[R + D, h]``, and the scores of the kept edges or None.

    ``weight`` is ``[Vl, h]``. Raises ValueError as :func:`head_logprobs`.
    """
    kept = head.edges.kept
    if kept is None:
        return hidden, None
    rows = len(head.edges.host_row)
    check_shapes(hidden[: -len(kept.predictor)], weight, head)
    return hidden[:rows], kept_scores(head_kept_logits(hidden[rows:], weight, head, kept), kept)


def check_shapes(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> None:
    """Raise ValueError as :func:`head_logprobs`, for other shapes than ``[R, h]`` and ``[Vl, h]``."""
    rows = len(head.edges.host_row)
    if hidden.ndim != 2 or len(hidden) != rows:
        raise ValueError(f"hidden must be [{rows}, h], a row for every predictor, not {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight must be [vocabulary, {hidden.shape[1]}], not {list(weight.shape)}")


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: Head, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities ``[E]`` and entropies ``[R]`` or None for ``[R, h]`` and ``[Vl, h]``."""
        chunks = Chunks(hidden, weight, head)
        empty = hidden.new_empty(0, dtype=chunks.dtype)
        sums = RowSums.empty(len(hidden), with_entropy=with_entropy, like=empty)
        target = empty.new_empty(len(head.edges.token_id))
        for rows, edges in chunks:
            products = chunks.products(rows)
            target[edges] = chunks.target(rows, edges, products)
            sums[rows].set(chunks.softmax(rows, products, with_entropy=with_entropy).sums)
        sums = over_ranks(sums, head.group)
        if head.group is not None:
            dist.all_reduce(target, group=head.group)
        ctx.save_for_backward(hidden, weight, *sums.parts)
        ctx.set_materialize_grads(False)  # who does not use the entropies does not pay for their gradient
        ctx.head = head
        return sums[head.edges.row_of_edge].logprob(target), sums.entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprob, grad_entropy = grad_outputs
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, *saved = ctx.saved_tensors
        head: Head = ctx.head
        sums = RowSums(*saved)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        sink = head.weight_grad if of_weight else None
        chunks = Chunks(hidden, weight, head)
        grads = Grads(
            chunks, of_hidden=of_hidden, of_weight=of_weight, weight_grad=None if sink is None else sink.buffer()
        )
        add_gradients(chunks, grads, sums, grad_logprob, grad_entropy)
        grad_weight = sink.placeholder() if sink is not None else grads.weight
        return grads.hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def add_gradients(
    chunks: Chunks, grads: Grads, sums: RowSums, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> None:
    """Form the logits again, and add the gradients that follow from ``[E]`` and ``[R]``; None for an unused output."""
    row_of_edge = chunks.head.edges.row_of_edge
    per_row = None if grad_logprob is None else sum_per_row(grad_logprob, row_of_edge, sums.total)
    for rows, edges in chunks:
        products = chunks.products(rows)
        of_outputs = LogitGrads(
            row=None if per_row is None else per_row[rows],
            entropy=None if grad_entropy is None else grad_entropy[rows],
            edges=None if grad_logprob is None else chunks.edge_grads(rows, edges, grad_logprob),
        )
        grad = softmax_backward(
            products,
            sums[rows],
            of_outputs,
            out=chunks.gradient_memory(len(products)),
            scale=None if chunks.scale is None else chunks.scale[rows],
            overwrite=True,
        )
        grads.add_(rows, grad)
