"""The logits of a chunk of rows at a time, and the gradients that they are turned into.

Legend: P padded tokens, E edges, R rows (predictors with an edge), C rows of a chunk, h hidden size, Vl local columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.edges import Edges, mask_padding_, wide
from mcore_prefix_tree.logprob.softmax import BlockSoftmax, EdgeGrads

# Logits of a chunk, and the rows that it has at least: a chunk costs a pass over the weight and over the sum of its
# gradient, which few rows do not pay for. Measured for a processor, whose caches like chunks small; for a GPU derived
# from the ratio of its arithmetic to its memory bandwidth.
_CPU = (2**23, 256)
_GPU = (2**28, 2048)


def default_chunk_rows(columns: int, device: torch.device) -> int:
    """Return C for this many columns of logits on this rank."""
    logits, least_rows = _CPU if device.type == "cpu" else _GPU
    return max(least_rows, logits // columns)


def cut(settled_by: npt.NDArray[np.int64], head_chunk_rows: int) -> list[slice]:
    """Cut R rows into ascending chunks of at most C, so that few rows are scored together with one of a later chunk.

    Such a row is projected twice, one product more than the three of others. A border that spares fewer of them than a
    fourth of the rows by which it makes its chunk smaller is not worth the chunks that follow from it. The chunks
    depend only on ``settled_by``, int64 ``[R]`` of :class:`Edges`, and C: rows of a product of another height may have
    other bits, and a policy's old log-probabilities must equal those of the step that they are compared with.
    """
    rows = len(settled_by)
    # How many rows before a border are settled behind it.
    steps = np.zeros(rows + 2, dtype=np.int64)
    steps[1 : rows + 1] += 1
    np.subtract.at(steps, settled_by + 1, 1)
    torn = steps.cumsum()
    chunks = []
    stop = rows
    while stop > 0:
        start = max(0, stop - head_chunk_rows)
        if start:
            # From the end, so that the last chunk is full.
            smaller = np.arange(head_chunk_rows // 2 + 1)
            start += int(np.argmin(torn[start + smaller] + smaller / 4))
        chunks.append(slice(start, stop))
        stop = start
    return chunks[::-1]


class WeightGradSink(Protocol):
    """Receiver of the weight's gradient in place of autograd, as Megatron's gradient accumulation fusion does."""

    def buffer(self) -> torch.Tensor:
        """``[Vl, h]``, fp32 or the weight's dtype, to add to."""

    def placeholder(self) -> torch.Tensor | None:
        """Return the gradient for autograd; call it once the gradient has been added."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """The factors of a row's logits, in addition to hidden states and weight."""

    edges: Edges
    # Factor on the product of hidden states and weight, as in muP (https://arxiv.org/abs/2203.03466).
    multiplier: float = 1.0
    temperature: torch.Tensor | None = None  # [P], temperature of each predictor; None means 1
    vocab_start: int = 0  # id of this rank's first column
    # Tensor-parallel group over which the vocabulary is split, None if it is not.
    group: dist.ProcessGroup | None = None
    head_chunk_rows: int | None = None  # C; default_chunk_rows if None
    weight_grad: WeightGradSink | None = None  # receiver of the weight's gradient; None leaves it to autograd
    vocab_size: int | None = None  # id from which columns are padding, which has no probability; None means no padding


class Chunks:
    """Logits of ``hidden @ weight.T``, a chunk of rows at a time."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, like: Chunks | None = None) -> None:
        """Project hidden ``[R, h]`` with weight ``[Vl, h]``; reuse the memory of ``like``, finished chunks."""
        self.hidden, self.weight, self.head = hidden, weight, head
        self.dtype = wide(hidden.dtype)
        self._product: torch.Tensor
        self._logits: torch.Tensor
        if like is not None:
            self._product, self._logits = like._product, like._logits
        else:
            # One allocation for all chunks: fresh memory costs a processor more than the softmax does.
            most = head.head_chunk_rows or default_chunk_rows(len(weight), weight.device)
            self._product = hidden.new_empty((min(most, len(hidden)), len(weight)))
            is_wide = hidden.dtype == self.dtype
            self._logits = self._product if is_wide else torch.empty_like(self._product, dtype=self.dtype)
        self._scratch: torch.Tensor | None = None
        here, self.column = head.edges.column(head.vocab_start, len(weight))
        self.here = here
        self.scale: torch.Tensor | None = None
        if head.temperature is not None:
            self.scale = head.multiplier / head.temperature[head.edges.row].to(self.dtype)
        elif head.multiplier != 1.0:
            self.scale = hidden.new_full((len(hidden),), head.multiplier, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Rows of a chunk, and their edges."""
        for rows in cut(self.head.edges.host_settled_by, len(self._product)):
            yield rows, self.head.edges.of_rows(rows)

    def products(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """``[C, Vl]`` of no more rows than a chunk has, in fp32 or wider, in memory that the next ones will be in.

        They are logits but for their scale.
        """
        count = len(rows) if isinstance(rows, torch.Tensor) else rows.stop - rows.start
        found = self._logits[:count]
        if widens(self.hidden):
            multiply(self.hidden[rows], self.weight.t(), out=found)
        else:
            product = self._product[:count]
            torch.mm(self.hidden[rows], self.weight.t(), out=product)
            found.copy_(product)
        return mask_padding_(found, self.head.vocab_size, self.head.vocab_start)

    def logits(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return :meth:`products` ``[C, Vl]`` times their scale."""
        logits = self.scaled_(rows, self.products(rows))
        return logits if self.scale is None else mask_padding_(logits, self.head.vocab_size, self.head.vocab_start)

    def scaled_(self, rows: slice | torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Multiply ``[C, Vl]`` in place by the scale of these rows: products, or the gradients of logits."""
        return block if self.scale is None else block.mul_(self.scale[rows, None])

    def softmax(self, rows: slice, products: torch.Tensor, *, with_entropy: bool) -> BlockSoftmax:
        """Return the softmax of these rows' products ``[C, Vl]``, which are overwritten."""
        scale = None if self.scale is None else self.scale[rows]
        return BlockSoftmax(products, scale=scale, with_entropy=with_entropy, scratch=lambda: self.scratch(rows))

    def gradient_memory(self, count: int) -> torch.Tensor | None:
        """Memory for the gradient of so many rows, ``[count, Vl]``, in the dtype of its products; None is the block."""
        return None if self._product is self._logits else self._product[:count]

    def scratch(self, rows: slice) -> torch.Tensor:
        """Memory of the size of some rows' logits, the same for every chunk."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self._logits)
        return self._scratch[: rows.stop - rows.start]

    def target(self, rows: slice, edges: slice, products: torch.Tensor) -> torch.Tensor:
        """Return the logit of each edge's token, ``[E]`` from ``[C, Vl]``; 0 if it is on another rank."""
        row = self.head.edges.row_of_edge[edges]
        found = products[row - rows.start, self.column[edges]]
        if self.scale is not None:
            found = found * self.scale[row]
        return torch.where(self.here[edges], found, 0)

    def edge_grads(self, rows: slice, edges: slice, grad: torch.Tensor) -> EdgeGrads:
        """Select a chunk's part of the gradients ``[E]`` of all edges."""
        return EdgeGrads(
            row=self.head.edges.row_of_edge[edges] - rows.start,
            column=self.column[edges],
            grad=torch.where(self.here[edges], grad[edges], 0),
        )


class Grads:
    """Gradients of hidden ``[R, h]`` and weight ``[Vl, h]``, or added to ``weight_grad``, from one chunk at a time.

    If ``gathered``, chunks have rows in any order, and may repeat a row.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        of_hidden: bool,
        of_weight: bool,
        weight_grad: torch.Tensor | None = None,
        gathered: bool = False,
    ):
        self._chunks = chunks
        made = torch.zeros_like if gathered else torch.empty_like
        self.hidden = made(chunks.hidden) if of_hidden else None
        self.weight = weight_grad
        if of_weight and weight_grad is None:
            # In fp32 for any dtype of the weight: it is a sum over chunks.
            self.weight = torch.zeros_like(chunks.weight, dtype=chunks.dtype)

    def add_(self, rows: slice | torch.Tensor, grad: torch.Tensor) -> None:
        """Take the gradient of some rows' products ``[C, Vl]``. Indices of rows are all different."""
        chunks = self._chunks
        # Stock backward multiplies in the dtype of the weights too.
        grad = grad.to(chunks.hidden.dtype)
        if self.hidden is not None:
            if isinstance(rows, torch.Tensor):
                self.hidden.index_add_(0, rows, grad @ chunks.weight)
            else:
                torch.mm(grad, chunks.weight, out=self.hidden[rows])
        if self.weight is not None:
            add_product_(self.weight, grad.t(), chunks.hidden[rows])


# The first torch whose addmm adds 16-bit products to an fp32 sum. It does neither on a CPU nor with ROCm.
_FIRST = (2, 11)


def widens(tensor: torch.Tensor) -> bool:
    """Return whether a product of tensors like this one, ``[...]``, can be in fp32, or is as wide anyway."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return True
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return tensor.is_cuda and version >= _FIRST and torch.version.hip is None and not torch.cuda.tunable.is_enabled()


def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write ``left @ right`` of one dtype into ``out``, in that dtype, or in fp32 if it :func:`widens`."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` ``[n, m]`` to a sum in the same or a wider dtype, without a temporary if it widens."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif widens(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
