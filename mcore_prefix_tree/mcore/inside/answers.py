"""From what the last stage says of folded tokens to what it says of rows.

Legend: T tokens of the packed micro-batch, with its padding; P tokens of the folded one, with its padding; E edges, one
for every token of every row; h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

from mcore_prefix_tree.logprob import Edges, Head, head_logprobs
from mcore_prefix_tree.mcore.inside.rows import FoldedRows
from mcore_prefix_tree.mcore.seam.output_layer import HeadRequest
from mcore_prefix_tree.upload import upload

# Columns whose gradients are summed in fp32 at a time.
_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLogprobs:
    """The ``output_processor`` of a model that folds inside, for trainers that only read log-probabilities.

    The model answers ``[1, T, 1]``, the log-probability of each label, or ``[1, T, 2]`` with the entropy of each
    position's distribution. Both are 0 at padding, and the first is 0 where the label is outside the vocabulary. No
    logits of more than a chunk of unique tokens exist at a time. It works on every megatron-core that is supported.

    Attributes:
        labels: int64 ``[1, T]``, the token to score at each position, as for ``GPTModel.forward(labels=)``.
        temperature: the logits are divided by it.
        entropy: compute it too.
    """

    labels: torch.Tensor
    temperature: float = 1.0
    entropy: bool = False

    def request(self, rows: FoldedRows, *, folded: bool) -> HeadRequest:
        """Return the request to the output layer.

        Args:
            rows: of the micro-batch.
            folded: whether it is folded in the model; else every position has a hidden state of its own.
        """
        at = rows.position
        answers = rows.layout.sample_map if folded else at
        padded_size = rows.layout.padded_size if folded else rows.size
        order = np.argsort(answers, kind="stable")
        edges = Edges.of_candidates(
            answers[order].astype(np.int64), np.zeros((len(order), 1)), padded_size=padded_size, device=rows.device
        )
        position = upload(at[order], rows.device)
        label = self.labels.reshape(-1).index_select(0, position)

        def answer(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
            size = len(weight) * (1 if head.group is None else head.group.size())
            logprob, entropy = head_logprobs(hidden, weight, head, with_entropy=self.entropy)
            logprob = torch.where((label >= 0) & (label < size), logprob, 0)
            columns = [logprob.new_zeros(rows.size).index_put((position,), logprob)]
            if entropy is not None:
                columns.append(expand(entropy, rows, dim=0) if folded else entropy)
            return torch.stack(columns, dim=1)

        temperature = torch.full((padded_size,), self.temperature, dtype=torch.float64, device=rows.device)
        return HeadRequest(
            edges=replace(edges, token_id=label),
            temperature=None if self.temperature == 1 else temperature,
            chunk_rows=None,
            answer=answer,
        )


def expand(values: torch.Tensor, rows: FoldedRows, dim: int) -> torch.Tensor:
    """Return for each position the value of its token, 0 for padding; a token's gradient is the sum over its rows.

    Args:
        values: P along ``dim``, any sizes otherwise.
        rows: of the micro-batch.
        dim: the tokens' dimension.
    """
    expanded: torch.Tensor = _Expand.apply(values, rows.place, rows.padded, dim)  # type: ignore[no-untyped-call]
    return expanded


class _Expand(torch.autograd.Function):
    """``index_select``, whose backward sums in fp32 or wider: many rows may share a token."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, place: torch.Tensor, padded: bool, dim: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.dim, ctx.tokens = dim, values.shape[dim]
        if padded:
            values = torch.cat((values, torch.zeros_like(values.narrow(dim, 0, 1))), dim)
        return values.index_select(dim, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,), (grad,) = ctx.saved_tensors, grads
        shape = [*grad.shape]
        shape[ctx.dim] = ctx.tokens + 1
        total = grad.new_zeros(shape)
        if grad.dtype.itemsize >= 4:
            total.index_add_(ctx.dim, place, grad)
        else:
            for part, sums in zip(grad.split(_COLUMNS, -1), total.split(_COLUMNS, -1), strict=True):
                wide = torch.zeros_like(sums, dtype=torch.float32)
                sums.copy_(wide.index_add_(ctx.dim, place, part.float()))
        return total.narrow(ctx.dim, 0, ctx.tokens), None, None, None


def expand_hidden(hidden: torch.Tensor, rows: FoldedRows, model: Any) -> torch.Tensor:
    """Return ``[T, 1, h]`` of ``[P, 1, h]``; under sequence parallelism this rank's part of each."""
    if not model.config.sequence_parallel:
        return expand(hidden, rows, dim=0)
    whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=model.tp_group)
    scattered: torch.Tensor = scatter_to_sequence_parallel_region(expand(whole, rows, dim=0), group=model.tp_group)
    return scattered


def loss_of_logits(model: Any, labels: torch.Tensor, logits: torch.Tensor, rows: FoldedRows) -> torch.Tensor:
    """Return the model's own loss ``[1, T]`` of expanded logits ``[1, T, V / tp]``, 0 at padding."""
    loss: torch.Tensor = model.compute_language_model_loss(labels, logits.transpose(0, 1).contiguous())
    return loss.masked_fill(rows.place == rows.layout.padded_size, 0) if rows.padded else loss


def for_rows(processor: Callable[..., Any], call: dict[str, Any], rows: FoldedRows, model: Any) -> Callable[..., Any]:
    """Return an ``output_processor`` that hands a trainer's own what an unfolded micro-batch would.

    The trainer's gets every row's hidden states, and no ``decoder_input``.
    """
    own = ("labels", "loss_mask", "input_ids", "position_ids", "packed_seq_params")

    def process(*, hidden_states: torch.Tensor, **others: Any) -> Any:
        given = {name: call.get(name) for name in own}
        given |= {"context": call.get("output_processor_context"), "decoder_input": None}
        return processor(hidden_states=expand_hidden(hidden_states, rows, model), **others | given)

    return process
