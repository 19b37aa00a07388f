"""The vocabulary head with a loss whose terms each read several full rows, for example a chunk of text.

A block has some of the terms and every row that they read, in any order; a row that terms of several blocks read is
projected in each. As in :mod:`mcore_prefix_tree.logprob.head_losses`, gradients are formed from a block's logits while
they exist, and backward only scales them.

Legend: R rows (predictors with an edge), A rows of a block, h hidden size, Vl columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mcore_prefix_tree.logprob.head_chunks import Chunks, Grads, Head
from mcore_prefix_tree.logprob.head_losses import forms_gradient, keep, kept

# Of a block's number and its logits [A, Vl]: the values of its terms, without a gradient, and the gradient of the loss
# at the logits, or None if it is not needed.
BlockLoss = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def head_block_losses(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, blocks: Sequence[torch.Tensor], loss: BlockLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a loss that sums over blocks of rows and reads each block completely.

    Memory, use and errors are those of :func:`~mcore_prefix_tree.logprob.head_losses.head_weighted_sum`;
    ``head_chunk_rows`` has no effect, because the blocks are given.

    Args:
        hidden, weight, head: ``[R + m, h]``, ``[Vl, h]``, as in
            :func:`~mcore_prefix_tree.logprob.head.head_logprobs`, but with any m rows behind those of the edges; of
            the edges, only the rows are read.
        blocks: int64 ``[A]`` each, different indices of the R + m rows.
        loss: function called once per block. The logits are in fp32 or wider and divided by the rows' temperatures;
            each rank of the group has its columns, and ranks call it together. It may overwrite them. Gradients are
            enabled if one is needed.

    Returns:
        A scalar 0 whose gradients are those of the loss, to be added to its value; and the values of all blocks' terms,
        one block after the other, without gradients.
    """
    with_grad = forms_gradient(hidden[: len(head.edges.host_row)], weight, head)
    found: tuple[torch.Tensor, torch.Tensor] = _HeadBlockLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, head, blocks, loss, with_grad
    )
    return found


class _HeadBlockLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        head: Head,
        blocks: Sequence[torch.Tensor],
        loss: BlockLoss,
        with_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 0 and the values of all terms, ``[terms]``, for states ``[R + m, h]`` and weight ``[Vl, h]``."""
        largest = max((len(rows) for rows in blocks), default=1)
        chunks = Chunks(hidden, weight, replace(head, head_chunk_rows=largest))
        of_hidden, of_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grads = Grads(chunks, of_hidden=of_hidden, of_weight=of_weight, gathered=True)
        values = [hidden.new_empty(0, dtype=chunks.dtype)]
        for number, rows in enumerate(blocks):
            logits = chunks.logits(rows)
            with torch.set_grad_enabled(with_grad):
                found, grad = loss(number, logits)
            values.append(found)
            if with_grad:
                assert grad is not None, "asked for"
                grads.add_(rows, chunks.scaled_(rows, grad))
        keep(ctx, grads, head, weight.dtype)
        together = torch.cat(values)
        ctx.mark_non_differentiable(together)
        return together.new_zeros(()), together

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *kept(ctx, grad_outputs[0]), None, None, None, None
