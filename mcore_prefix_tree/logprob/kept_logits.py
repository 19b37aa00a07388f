"""Log-probabilities and entropies over kept sets of ids: a softmax of K logits instead of rows of the vocabulary.

The fused head multiplies a chunk of hidden states with the rows of the output weight that any of its sets keeps. These
K logits are all that is kept for backward, so that no product is computed twice. Each rank of a tensor-parallel group
has the logits of its columns; their sum over the group makes them known to all, and what follows is the same on
every rank.

Legend: P padded tokens, D rows (a predictor and a set), M edges (a row and the token drawn), K kept ids of all rows,
C rows of a chunk, U ids that any of them keeps, h hidden size, Vl local columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.utils.upload import upload

if TYPE_CHECKING:
    from mcore_prefix_tree.logprob.head_chunks import Head

# Most rows of a chunk, and kept ids if it has several rows: they bound its product at C * U, and its copy of the weight
# at U * h. Measured for a processor, whose products of more rows waste more on the ids that only some of them keep.
_ROWS, _IDS = 256, 2**13


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptChunk:
    """Rows that are multiplied together, and their kept ids."""

    # rows, ids: which of the D rows, and of the K kept ids.
    rows: slice
    ids: slice
    host_columns: npt.NDArray[np.int64]  # int64 [U], each id once, ascending, on the host
    columns: torch.Tensor  # the same on the device


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRows:
    """The edges of a layout whose tokens were drawn from kept sets, as tensors."""

    predictor: torch.Tensor  # int64 [D], flat index of the token that predicts
    token_id: torch.Tensor  # int64 [K], the kept ids of one row after the other
    column: torch.Tensor  # int64 [K], index of each among its chunk's columns
    row_of_id: torch.Tensor  # int64 [K]
    offsets: torch.Tensor  # int64 [D + 1], row d keeps the ids offsets[d]:offsets[d + 1]
    row_of_edge: torch.Tensor  # int64 [M]
    target: torch.Tensor  # int64 [M], index among the K of the id that was drawn
    place: torch.Tensor  # int64 [M], place of each edge's score
    chunks: tuple[KeptChunk, ...]  # the cut of the rows
    largest_id: int  # the largest kept id

    @classmethod
    def from_layout(
        cls, layout: FlatLayout, needed: npt.NDArray[np.bool_], *, device: torch.device | str = "cpu"
    ) -> KeptRows | None:
        """Return the kept edges among ``needed``, bool ``[M]``; None without any."""
        kept = layout.kept
        edges = np.flatnonzero(needed)
        if kept is None or not len(edges):
            return None
        some, row_of_edge = np.unique(kept.distribution[edges], return_inverse=True)
        sizes = np.diff(kept.offsets)[some]
        offsets = np.append(0, np.cumsum(sizes))
        row_of_id = np.repeat(np.arange(len(some)), sizes)
        ids = kept.token_ids[np.arange(offsets[-1]) + (kept.offsets[some] - offsets[:-1])[row_of_id]].astype(np.int64)
        # Ascending, because ids ascend within a row.
        drawn = row_of_edge << 32 | layout.edge_token_id[kept.token[edges]].astype(np.int64)
        column, chunks = _cut(ids, offsets, device)
        return cls(
            predictor=upload(kept.predictor[some], device),
            token_id=upload(ids, device),
            column=upload(column, device),
            row_of_id=upload(row_of_id, device),
            offsets=upload(offsets, device),
            row_of_edge=upload(row_of_edge, device),
            target=upload(np.searchsorted(row_of_id << 32 | ids, drawn), device),
            place=upload(len(layout.edge_predictor) + edges, device),
            chunks=chunks,
            largest_id=int(ids.max()),
        )


def _cut(
    ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], device: torch.device | str
) -> tuple[npt.NDArray[np.int64], tuple[KeptChunk, ...]]:
    """Cut the rows of ids ``[K]`` into chunks; return each id's index among its chunk's columns too, ``[K]``."""
    column = np.empty_like(ids)
    chunks = []
    start, rows = 0, len(offsets) - 1
    while start < rows:
        full = int(np.searchsorted(offsets, offsets[start] + _IDS, side="right")) - 1
        stop = max(start + 1, min(full, start + _ROWS))
        own = slice(int(offsets[start]), int(offsets[stop]))
        columns, column[own] = np.unique(ids[own], return_inverse=True)
        chunks.append(
            KeptChunk(rows=slice(start, stop), ids=own, host_columns=columns, columns=upload(columns, device))
        )
        start = stop
    return column, tuple(chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptScores:
    """Scores of the kept edges, ``[M]`` each in nats, fp32 or better: log-probabilities, and their rows' entropies."""

    logprob: torch.Tensor
    entropy: torch.Tensor

    def detach(self) -> KeptScores:
        """Return the scores without gradients."""
        return KeptScores(logprob=self.logprob.detach(), entropy=self.entropy.detach())


def kept_scores(logits: torch.Tensor, kept: KeptRows) -> KeptScores:
    """Return the scores that follow from logits ``[K]`` of the kept ids."""
    shifted = logits - _of_rows(logits.detach(), "max", kept)[kept.row_of_id]
    exp = shifted.exp()
    total, moment = _of_rows(exp, "sum", kept), _of_rows(exp * shifted, "sum", kept)
    entropy = total.log() - moment / total
    logprob = shifted[kept.target] - total.log()[kept.row_of_edge]
    return KeptScores(logprob=logprob, entropy=entropy[kept.row_of_edge])


def _of_rows(values: torch.Tensor, reduction: str, kept: KeptRows) -> torch.Tensor:
    """Reduce ``[K]`` to ``[D]``, in a fixed order; no row is empty."""
    found: torch.Tensor = torch.segment_reduce(values, reduction, offsets=kept.offsets, unsafe=True)
    return found


def _check_vocabulary(kept: KeptRows, vocabulary: int | None) -> None:
    if vocabulary is not None and kept.largest_id >= vocabulary:
        raise ValueError(
            f"a sampling mask keeps the id {kept.largest_id}, outside the model's vocabulary of {vocabulary}; use the "
            "model that drew the tokens"
        )


def kept_logits(
    logits: torch.Tensor,
    kept: KeptRows,
    *,
    temperature: torch.Tensor | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the kept ids' logits ``[K]``, fp32 or better, from logits ``[P, Vl]``; see :func:`edge_logprobs`."""
    found: torch.Tensor = _KeptLogits.apply(  # type: ignore[no-untyped-call]
        logits, kept, temperature, vocab_start, group
    )
    return found


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        kept: KeptRows,
        temperature: torch.Tensor | None,
        vocab_start: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Return the kept ids' logits ``[K]`` for logits ``[P, Vl]`` and temperatures ``[P]``."""
        size = logits.shape[1]
        _check_vocabulary(kept, size + vocab_start if group is None else None)
        column = kept.token_id - vocab_start
        here, column = (column >= 0) & (column < size), column.clamp(0, size - 1)
        row = kept.predictor[kept.row_of_id]
        found = torch.where(here, logits[row, column], 0).to(torch.promote_types(logits.dtype, torch.float32))
        ctx.divisor = None if temperature is None else temperature.to(found.dtype)[row]
        if ctx.divisor is not None:
            found /= ctx.divisor
        if group is not None:
            dist.all_reduce(found, group=group)
        ctx.save_for_backward(here, row, column)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of this rank's logits ``[P, Vl]`` for ``[K]``."""
        here, row, column = ctx.saved_tensors
        if ctx.divisor is not None:
            grad = grad / ctx.divisor
        whole = grad.new_zeros(ctx.shape)  # in fp32 or better: several rows may keep an id of one predictor
        whole.index_put_((row, column), torch.where(here, grad, 0), accumulate=True)
        return whole.to(ctx.dtype), None, None, None, None


def head_kept_logits(hidden: torch.Tensor, weight: torch.Tensor, head: Head, kept: KeptRows) -> torch.Tensor:
    """Return the kept ids' logits ``[K]``, fp32 or better, equal on all ranks of the head's group.

    ``hidden`` is ``[D, h]``, the hidden states of the rows' predictors, and ``weight`` ``[Vl, h]``. The gradient of
    ``hidden`` is this rank's part: the caller sums it over the group. That of ``weight`` is 0 but for kept ids.

    Raises:
        ValueError: a kept id is outside the vocabulary.
    """
    found: torch.Tensor = _HeadKeptLogits.apply(hidden, weight, head, kept)  # type: ignore[no-untyped-call]
    return found


class _HeadKeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: Head, kept: KeptRows) -> torch.Tensor:
        """Return the kept ids' logits ``[K]`` for hidden states ``[D, h]`` and weight ``[Vl, h]``."""
        local = head.vocab_start + len(weight) if head.group is None else None
        _check_vocabulary(kept, head.vocab_size or local)
        found = hidden.new_zeros(len(kept.column), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in _parts(kept, head.vocab_start, len(weight)):
            product = hidden[part.rows] @ weight[part.columns].t()
            column = part.column.clamp(max=len(part.columns) - 1)
            found[part.ids] = torch.where(part.column == column, product[part.row, column], 0).to(found.dtype)
        _scale_(found, head, kept)
        if head.group is not None:
            dist.all_reduce(found, group=head.group)
        ctx.save_for_backward(hidden, weight)
        ctx.head, ctx.kept = head, kept
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients ``[D, h]`` and ``[Vl, h]`` for ``[K]``."""
        hidden, weight = ctx.saved_tensors
        head: Head = ctx.head
        kept: KeptRows = ctx.kept
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        sink = head.weight_grad if of_weight else None
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = None
        if of_weight:
            # In fp32 for any dtype of the weight: it is a sum over chunks.
            grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if sink is None else sink.buffer()
        grad = _scale_(grad.clone(), head, kept)
        for part in _parts(kept, head.vocab_start, len(weight)):
            columns = len(part.columns)
            product = grad.new_zeros(part.rows.stop - part.rows.start, columns + 1)  # the last is for other ranks' ids
            product[part.row, part.column] = grad[part.ids]
            # Stock backward multiplies in the dtype of the weights too.
            product = product[:, :columns].to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(product, weight[part.columns], out=grad_hidden[part.rows])
            if grad_weight is not None:
                of_columns = product.t() @ hidden[part.rows]
                grad_weight.index_add_(0, part.columns, of_columns.to(grad_weight.dtype))
        if sink is not None:
            return grad_hidden, sink.placeholder(), None, None
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _scale_(values: torch.Tensor, head: Head, kept: KeptRows) -> torch.Tensor:
    """Turn products ``[K]`` into logits, and the logits' gradient into the products', in place."""
    if head.multiplier != 1.0:
        values.mul_(head.multiplier)
    if head.temperature is not None:
        values.div_(head.temperature.to(values.dtype)[kept.predictor][kept.row_of_id])
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """This rank's part of a chunk: rows, ids, their rows and columns ``[k]`` (U: another rank's), columns ``[U]``."""

    rows: slice
    ids: slice
    row: torch.Tensor
    column: torch.Tensor
    columns: torch.Tensor


def _parts(kept: KeptRows, vocab_start: int, size: int) -> Iterator[_Part]:
    """Yield the parts of the chunks that keep any of this rank's ``size`` columns."""
    for chunk in kept.chunks:
        start, stop = np.searchsorted(chunk.host_columns, (vocab_start, vocab_start + size)).tolist()
        if start == stop:
            continue
        column = kept.column[chunk.ids]
        if start or stop < len(chunk.host_columns):
            column = torch.where((column >= start) & (column < stop), column - start, stop - start)
        yield _Part(
            rows=chunk.rows,
            ids=chunk.ids,
            row=kept.row_of_id[chunk.ids] - chunk.rows.start,
            column=column,
            columns=chunk.columns[start:stop] - vocab_start,
        )
