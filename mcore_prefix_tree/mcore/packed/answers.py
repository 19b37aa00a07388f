"""Conversion of the last stage's output for folded tokens into that for rows.

Legend: T tokens of the packed micro-batch, with its padding; P tokens of the folded one, with its padding; E edges, one
for every token of every row; h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.logprob import Edges, Head, edge_logprobs, head_logprobs
from mcore_prefix_tree.logprob.restore import expand as expand_tokens
from mcore_prefix_tree.mcore.packed.packed_rows import FoldedRows, PackedRows
from mcore_prefix_tree.mcore.seam.all_tokens import gather_tokens, split_tokens
from mcore_prefix_tree.mcore.seam.output_layer import HeadRequest, unpadded_vocab_size
from mcore_prefix_tree.utils.upload import upload

# Arguments of an output processor that come from the packed micro-batch.
_PACKED = ("labels", "loss_mask", "input_ids", "position_ids", "packed_seq_params")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLogprobs:
    """The ``output_processor`` for trainers that read log-probabilities and no logits; works on megatron-core 0.16 too.

    The model returns ``[1, T, 1]``, the log-probability of each label, or ``[1, T, 2]`` with the entropy of each
    position's distribution as well. Both are 0 at padding, and the first is 0 for labels outside the vocabulary. Logits
    exist for a chunk of unique tokens at a time.
    """

    labels: torch.Tensor  # int64 ``[1, T]``, the token to score at each position, as for ``GPTModel.forward(labels=)``
    temperature: float = 1.0  # divisor of the logits
    entropy: bool = False  # whether to compute the entropies too

    def request(self, rows: PackedRows) -> HeadRequest:
        """Return the request to the output layer; see :meth:`edges`."""
        edges, position = self.edges(rows)
        temperature = None
        if self.temperature != 1:
            temperature = torch.full((edges.padded_size,), self.temperature, dtype=torch.float64, device=rows.device)

        def answer(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
            """Return ``[T, 1]`` or ``[T, 2]`` from ``hidden`` ``[R, h]`` and ``weight`` ``[V / tp, h]``."""
            columns = len(weight) * (1 if head.group is None else head.group.size())
            logprob, entropy = head_logprobs(hidden, weight, head, with_entropy=self.entropy)
            found = [_at_positions(logprob, edges, position, rows, head.vocab_size or columns)]
            if entropy is not None:
                found.append(expand(entropy, rows, dim=0) if isinstance(rows, FoldedRows) else entropy)
            return torch.stack(found, dim=1)

        return HeadRequest(edges=edges, temperature=temperature, head_chunk_rows=None, answer=answer)

    def edges(self, rows: PackedRows) -> tuple[Edges, torch.Tensor]:
        """Return an edge to every label of a row, and its position in the packed micro-batch, int64 ``[E]``."""
        if isinstance(rows, FoldedRows):
            predictor, padded_size = rows.layout.sample_map.astype(np.int64), rows.layout.padded_size
        else:
            predictor, padded_size = rows.position, rows.size
        order = np.argsort(predictor, kind="stable")
        unknown = np.zeros((len(order), 1), dtype=np.int64)  # the labels stay on the device
        edges = Edges.of_candidates(predictor[order], unknown, padded_size=padded_size, device=rows.device)
        position = upload(rows.position[order], rows.device)
        labels = upload(self.labels, rows.device).reshape(-1)
        return replace(edges, token_id=labels.index_select(0, position)), position


def _at_positions(
    logprob: torch.Tensor, edges: Edges, position: torch.Tensor, rows: PackedRows, vocabulary: int
) -> torch.Tensor:
    """Return log-probabilities ``[T]`` from ``[E]``; 0 at padding and for labels outside the vocabulary."""
    known = (edges.token_id >= 0) & (edges.token_id < vocabulary)
    return logprob.new_zeros(rows.size).index_put((position,), torch.where(known, logprob, 0))


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor, rows: FoldedRows, model: Any) -> torch.Tensor:
    """Return the loss ``[1, T]`` of logits ``[1, P, V / tp]``, which backward overwrites."""
    edges, position = RowLogprobs(labels=labels).edges(rows)
    logprob, _ = edge_logprobs(
        logits.squeeze(0),
        edges,
        vocab_start=model.tp_group.rank() * logits.shape[-1],
        group=model.tp_group if model.tp_group.size() > 1 else None,
        in_place=True,
    )
    return -_at_positions(logprob, edges, position, rows, unpadded_vocab_size(model)).unsqueeze(0)


def expand(values: torch.Tensor, rows: FoldedRows, dim: int) -> torch.Tensor:
    """Return the value of each position's token, 0 for padding. The gradient of a token is the sum over its rows.

    ``values`` has size P along ``dim``, the result has size T.
    """
    return expand_tokens(values, rows.place, dim=dim, padded=rows.size > rows.layout.logical_tokens)


def expand_hidden(hidden: torch.Tensor, rows: FoldedRows, model: Any) -> torch.Tensor:
    """Return hidden states ``[T, 1, h]`` from ``[P, 1, h]``, or this rank's part of each."""
    return split_tokens(expand(gather_tokens(hidden, model), rows, dim=0), model)


def without_padding(output: torch.Tensor, rows: PackedRows, labels: torch.Tensor | None, model: Any) -> torch.Tensor:
    """Return a stock answer, ``[1, T, ...]`` or hidden states ``[T, 1, h]``, with 0 where folding answers 0.

    That is at padding, and as the loss of labels outside the vocabulary.
    """
    kept = np.zeros(rows.size, dtype=bool)
    kept[rows.position] = True
    keep = upload(kept, rows.device)
    if model.post_process and labels is not None:
        return torch.where(keep & (labels >= 0) & (labels < unpadded_vocab_size(model)), output, 0)
    if kept.all():
        return output
    if model.post_process:
        return torch.where(keep[None, :, None], output, 0)
    return torch.where(split_tokens(keep[:, None, None], model), output, 0)


def for_rows(
    processor: Callable[..., Any], call: Mapping[str, Any], rows: FoldedRows, model: Any
) -> Callable[..., Any]:
    """Return an ``output_processor`` that calls the trainer's own as an unfolded micro-batch would.

    It gets hidden states of all rows and no ``decoder_input``.
    """

    def process(*, hidden_states: torch.Tensor, **others: Any) -> Any:
        """Call the processor with hidden states ``[T, 1, h]`` of folded ones ``[P, 1, h]``."""
        packed = {name: call.get(name) for name in _PACKED}
        packed |= {"context": call.get("output_processor_context"), "decoder_input": None}
        return processor(hidden_states=expand_hidden(hidden_states, rows, model), **others | packed)

    return process
