"""The logits of a chunk of rows at a time, and the gradients that they are turned into.

Legend: P padded tokens, E edges, R rows (predictors with an edge), C rows of a chunk, h hidden size, Vl columns of the
vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.edges import Edges, slices, wide
from mcore_prefix_tree.logprob.rows import EdgeGrads, LogitShape

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


class Chunks:
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
        self._scratch: torch.Tensor | None = None

    def __iter__(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Rows, their edges, and their logits ``[C, Vl]`` in fp32 or wider, to be overwritten."""
        for rows in slices(len(self.hidden), self.rows_at_a_time):
            yield rows, self.head.edges.of_rows(rows), self.logits(rows)

    def logits(self, rows: slice) -> torch.Tensor:
        """``[C, Vl]`` of at most ``rows_at_a_time`` rows, in fp32 or wider, in memory that the next ones will be in."""
        product = self._product[: rows.stop - rows.start]
        logits = self._logits[: rows.stop - rows.start]
        torch.mm(self.hidden[rows], self.weight.t(), out=product)
        if logits is not product:
            logits.copy_(product)
        self.head.shape.apply_(logits)
        if self.temperature is not None:
            logits.div_(self.temperature[rows, None])
        return logits

    def scratch(self, rows: slice) -> torch.Tensor:
        """Memory of the size of some rows' logits, the same for every chunk."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self._logits)
        return self._scratch[: rows.stop - rows.start]

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


class Grads:
    """Gradients of hidden states and weight, from those of the logits a chunk at a time."""

    def __init__(self, chunks: Chunks, *, of_hidden: bool, of_weight: bool, weight_grad: torch.Tensor | None = None):
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
