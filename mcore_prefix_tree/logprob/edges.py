"""Log-probability of every edge (predictor, token) from vocabulary-parallel logits, each row of logits read once.

A token is scored by its predictor. At a branch point several tokens have the same predictor, so one row of logits
serves several edges and its gradient is their sum:

    log p(e)         = log softmax(logits[predictor(e)])[token(e)]
    d / d logits[i]  = sum over e with predictor i of g(e) * (onehot(token(e)) - softmax(logits[i]))

and for the entropy H_i = -sum_v p_iv log p_iv of a row:  d H_i / d logits_iv = -p_iv (log p_iv + H_i).

:mod:`mcore_prefix_tree.logprob.head` computes the same from hidden states, without the logits.

Legend: P padded tokens, E edges, R rows (predictors with an edge), V vocabulary, Vl its part on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.logprob.kept_logits import KeptRows, KeptScores, kept_logits, kept_scores
from mcore_prefix_tree.logprob.softmax import (
    EdgeGrads,
    LogitGrads,
    RowSums,
    kernels_take,
    over_ranks,
    softmax_backward,
    softmax_sums,
    sum_per_row,
)
from mcore_prefix_tree.utils.upload import upload

# Rows of logits in fp32 at a time: bounds the temporary memory at ROWS * Vl.
ROWS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """The scored edges of a layout, in the order of their predictors."""

    predictor: torch.Tensor  # int64 [E], flat index of the token that predicts
    # int64 [E], flat index of the token that is predicted; None for tokens that need not be in the layout, for
    # example a teacher's.
    token: torch.Tensor | None
    token_id: torch.Tensor  # int64 [E], id of that token in the vocabulary
    row: torch.Tensor  # int64 [R], every predictor once, ascending
    row_of_edge: torch.Tensor  # int64 [E]: predictor == row[row_of_edge]
    # host_row, host_settled_by: row and settled_by on the host.
    host_row: npt.NDArray[np.int64]
    first_edge: npt.NDArray[np.int64]  # int64 [R + 1] on the host, row r predicts edges first_edge[r]:first_edge[r + 1]
    # int64 [R], the last row that is scored together with this one: once its log-probabilities are known, so are
    # all others that a loss of samples reads with this row's.
    settled_by: torch.Tensor
    host_settled_by: npt.NDArray[np.int64]
    padded_size: int  # P
    num_places: int  # the number of scores: P, and P + M for a layout with M kept edges
    kept: KeptRows | None = None  # the other edges, whose tokens were drawn from kept sets; None without any

    @classmethod
    def from_layout(
        cls, layout: FlatLayout, *, needed: npt.NDArray[np.bool_] | None = None, device: torch.device | str = "cpu"
    ) -> Edges:
        """Return the edges of the predicted tokens, which are all but the first of each root.

        Rows are scored together if a sample goes through both. Places outside ``needed``, bool ``[P + M]``, have no
        edge: their log-probability is 0.
        """
        needed = layout.has_edge if needed is None else needed
        of_token = layout.edge_predictor
        token = np.flatnonzero((of_token >= 0) & needed[: len(of_token)])
        token = token[np.argsort(of_token[token], kind="stable")]
        predictor = of_token[token].astype(np.int64)
        row, first, row_of_edge = np.unique(predictor, return_index=True, return_inverse=True)
        # The samples through a token end in its subtree, which is an interval.
        settled_by = np.searchsorted(row, layout.subtree_end[row]) - 1
        return cls(
            predictor=upload(predictor, device),
            token=upload(token, device),
            token_id=upload(layout.edge_token_id[token], device).long(),
            row=upload(row, device),
            row_of_edge=upload(row_of_edge, device),
            host_row=row,
            first_edge=np.append(first, len(token)),
            settled_by=upload(settled_by, device),
            host_settled_by=settled_by,
            padded_size=layout.padded_size,
            num_places=layout.num_places,
            kept=KeptRows.from_layout(layout, needed[len(of_token) :], device=device),
        )

    @classmethod
    def of_candidates(
        cls,
        predictor: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.integer],
        *,
        padded_size: int,
        device: torch.device | str = "cpu",
    ) -> Edges:
        """Return an edge for each of k tokens of each of R questions, in order; no two rows are scored together.

        ``predictor``, int64 ``[R]``, ascending, has the flat indices that the questions are about; ``token_ids`` is
        ``[R, k]``.
        """
        k = token_ids.shape[1]
        row, first, row_of_question = np.unique(predictor, return_index=True, return_inverse=True)
        return cls(
            predictor=upload(np.repeat(predictor, k), device),
            token=None,
            token_id=upload(token_ids.astype(np.int64).ravel(), device),
            row=upload(row, device),
            row_of_edge=upload(np.repeat(row_of_question, k), device),
            host_row=row,
            first_edge=np.append(first, len(predictor)) * k,
            settled_by=torch.arange(len(row), device=device),
            host_settled_by=np.arange(len(row)),
            padded_size=padded_size,
            num_places=padded_size,
        )

    def scored_together(self, predictor: npt.NDArray[np.int64], term: npt.NDArray[np.int64]) -> Edges:
        """Return these edges for a loss whose terms read more than one sample each.

        ``predictor`` and ``term``, int64 ``[K]``, have the flat indices that terms read, and the number of each term.
        Kept edges, from P on, are scored before all others.
        """
        is_row = predictor < self.padded_size
        predictor, term = predictor[is_row], term[is_row]
        row = np.searchsorted(self.host_row, predictor)
        last = np.zeros(term.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(last, term, row)
        settled_by = np.arange(len(self.host_row))
        np.maximum.at(settled_by, row, last[term])
        on_device = upload(settled_by, self.settled_by.device)
        return replace(self, settled_by=on_device, host_settled_by=settled_by)

    def some_rows(
        self, chosen: npt.NDArray[np.bool_], on_device: torch.Tensor
    ) -> tuple[Edges, torch.Tensor, torch.Tensor]:
        """Return the edges of some rows, no two of them scored together, and int64 indices of these rows and edges.

        ``chosen`` is bool ``[R]`` on the host, and ``on_device`` on the edges' device, so that the host does not wait
        for it.
        """
        count = np.diff(self.first_edge)[chosen]
        rows = _places(on_device, len(count))
        edges = _places(on_device[self.row_of_edge], int(count.sum()))
        own_row = (on_device.cumsum(0) - 1)[self.row_of_edge[edges]]
        return (
            Edges(
                predictor=self.predictor[edges],
                token=None if self.token is None else self.token[edges],
                token_id=self.token_id[edges],
                row=self.row[rows],
                row_of_edge=own_row,
                host_row=self.host_row[chosen],
                first_edge=np.append(0, count.cumsum()),
                settled_by=torch.arange(len(count), device=rows.device),
                host_settled_by=np.arange(len(count)),
                padded_size=self.padded_size,
                num_places=self.padded_size,
            ),
            rows,
            edges,
        )

    def of_rows(self, rows: slice) -> slice:
        """Return the edges that ``row[rows]`` predict."""
        return slice(int(self.first_edge[rows.start]), int(self.first_edge[rows.stop]))

    def column(self, vocab_start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each edge's token is in this rank's part of the vocabulary, and its column, clamped if not."""
        column = self.token_id - vocab_start
        return (column >= 0) & (column < size), column.clamp(0, size - 1)

    def at_tokens(self, per_edge: torch.Tensor) -> torch.Tensor:
        """Return a value of each edge ``[E]`` at the flat index of its token, ``[P + M]``; 0 elsewhere."""
        assert self.token is not None, "candidates are not in the layout"
        return per_edge.new_zeros(self.num_places).index_put((self.token,), per_edge)

    def placed(self, per_edge: torch.Tensor) -> torch.Tensor:
        """Return :meth:`at_tokens`, or ``[E]`` unchanged if the tokens need not be in the layout."""
        return per_edge if self.token is None else self.at_tokens(per_edge)

    def at_rows(self, per_row: torch.Tensor) -> torch.Tensor:
        """Return a value of each row ``[R]`` at the flat index of the predictor, 0 elsewhere: ``[P + M]``."""
        return per_row.new_zeros(self.num_places).index_put((self.row,), per_row)

    @property
    def head_row(self) -> torch.Tensor:
        """Flat indices of the hidden states that a head reads, int64 ``[R]``; with kept edges ``[R + D]``."""
        return self.row if self.kept is None else torch.cat([self.row, self.kept.predictor])

    @property
    def has_rows(self) -> bool:
        """Return whether an edge needs the whole vocabulary, or there is nothing else to score."""
        return self.kept is None or bool(len(self.host_row))

    def no_scores(self, like: torch.Tensor, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return zeros ``[P + M]``, and ``[P + M]`` or None, in the dtype of ``like``, ``[...]``."""
        zeros = like.new_zeros(self.num_places)
        return zeros, zeros if with_entropy else None

    def with_kept(
        self, kept: KeptScores | None, logprob: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities, and entropies or None, ``[P + M]``, with those of the kept edges in their places.

        An entropy stands at the place of each edge that is drawn from its distribution.
        """
        if self.kept is None or kept is None:
            return logprob, entropy
        place = (self.kept.place,)
        if entropy is not None:
            entropy = entropy.index_put(place, kept.entropy)
        return logprob.index_put(place, kept.logprob), entropy


def _places(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the true indices of a mask ``[n]``, ascending, given their count: ``nonzero`` waits for the device."""
    return mask.int().argsort(descending=True, stable=True)[:count]


def slices(count: int, size: int) -> Iterator[slice]:
    """``0:size, size:2 * size, ...`` up to ``count``."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def row_blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Cut the rows of ``[P, Vl]`` for a softmax: kernels make no temporary, and take all at once."""
    return slices(len(logits), max(1, len(logits)) if kernels_take(logits) else ROWS)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of reductions: fp32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


class _EdgeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        edges: Edges,
        temperature: torch.Tensor | None,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        in_place: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities ``[E]`` and entropies ``[R]`` or None for logits ``[P, Vl]``."""
        empty = logits.new_empty(0, dtype=wide(logits.dtype))
        sums = RowSums.empty(logits.shape[0], with_entropy=with_entropy, like=empty)
        scale = None if temperature is None else temperature.reciprocal()
        for rows in row_blocks(logits):
            own_scale = None if scale is None else scale[rows]
            sums[rows].set(softmax_sums(logits[rows], scale=own_scale, with_entropy=with_entropy))
        here, column = edges.column(vocab_start, logits.shape[1])
        target = logits[edges.predictor, column].to(empty.dtype)
        if scale is not None:
            target.mul_(scale[edges.predictor])
        target = torch.where(here, target, 0)
        sums = over_ranks(sums, group)
        if group is not None:
            dist.all_reduce(target, group=group)
        ctx.save_for_backward(logits, scale, *sums.parts)
        ctx.set_materialize_grads(False)
        ctx.edges, ctx.vocab_start, ctx.in_place = edges, vocab_start, in_place
        return sums[edges.predictor].logprob(target), sums.entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprob, grad_entropy = grad_outputs
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None, None, None
        logits, scale, *saved = ctx.saved_tensors
        edges: Edges = ctx.edges
        sums = RowSums(*saved)
        here, column = edges.column(ctx.vocab_start, logits.shape[1])
        per_row = at_target = None
        if grad_logprob is not None:
            per_row = sum_per_row(grad_logprob, edges.predictor, sums.total)
            at_target = torch.where(here, grad_logprob, 0)
        grad = None if ctx.in_place else torch.empty_like(logits)
        for rows in row_blocks(logits):
            owned = edges.of_rows(slice(*np.searchsorted(edges.host_row, (rows.start, rows.stop))))
            of_edges = None
            if at_target is not None:
                row = edges.predictor[owned] - rows.start
                of_edges = EdgeGrads(row=row, column=column[owned], grad=at_target[owned])
            grads = LogitGrads(
                row=None if per_row is None else per_row[rows],
                entropy=None if grad_entropy is None else grad_entropy[rows],
                edges=of_edges,
            )
            own_scale = None if scale is None else scale[rows]
            out = None if grad is None else grad[rows]
            softmax_backward(logits[rows], sums[rows], grads, out=out, scale=own_scale)
        return logits if grad is None else grad, None, None, None, None, None, None


def edge_logprobs(
    logits: torch.Tensor,
    edges: Edges,
    *,
    temperature: torch.Tensor | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of every token given its path, and the entropy of each token's prediction.

    Args:
        logits: ``[P, Vl]``, this rank's columns, in any floating dtype; reductions are in fp32 or better.
        edges: edges of the layout that the logits come from.
        temperature: ``[P]``, divisor of each row of logits; None means 1.
        vocab_start: id of the first column.
        group: tensor-parallel group over which the vocabulary is split, None if it is not.
        in_place: whether backward overwrites the logits with the gradient, which halves the peak. For logits that
            nobody reads afterwards; autograd rejects a second backward.

    Returns:
        Log-probabilities ``[P + M]`` in nats, at each token's flat index, 0 if nothing predicts the token, and behind
        these the M kept edges'; ``[E]`` for edges to tokens that need not be in the layout. And the entropies
        ``[P + M]`` in nats, of the predictors and of the kept edges' distributions, or None. Equal on all ranks of the
        group, fp32 or better.

    Raises:
        ValueError: if the logits are not ``[padded_size, Vl]``, or a kept id is outside the vocabulary.
    """
    if logits.ndim != 2 or logits.shape[0] != edges.padded_size:
        raise ValueError(f"logits must be [{edges.padded_size}, vocabulary], not {list(logits.shape)}")
    if temperature is not None:
        temperature = temperature.to(wide(logits.dtype))
    split: dict[str, Any] = {"temperature": temperature, "vocab_start": vocab_start, "group": group}
    of_kept = None if edges.kept is None else kept_scores(kept_logits(logits, edges.kept, **split), edges.kept)
    if edges.has_rows:
        per_edge, entropy = _EdgeLogprobs.apply(  # type: ignore[no-untyped-call]
            logits, edges, temperature, vocab_start, group, with_entropy, in_place
        )
        per_place = edges.placed(per_edge)
    else:
        assert of_kept is not None
        per_place, entropy = edges.no_scores(of_kept.logprob, with_entropy=with_entropy)
    if entropy is not None and len(entropy) < edges.num_places:
        entropy = torch.nn.functional.pad(entropy, (0, edges.num_places - len(entropy)))
    return edges.with_kept(of_kept, per_place, entropy)


# Its exponential is 0 next to any logit. It is finite, because a product of a probability of 0 and -inf is NaN.
_NEVER = -1e30


def mask_padding_(logits: torch.Tensor, vocab_size: int | None, vocab_start: int = 0) -> torch.Tensor:
    """Give the columns of padding of ``[..., Vl]`` no probability, in place, and return the tensor.

    Columns from id ``vocab_size`` on are padding, None means no padding; ``vocab_start`` is the id of the first column.
    """
    if vocab_size is not None and vocab_size < vocab_start + logits.shape[-1]:
        lowest = torch.finfo(logits.dtype).min / 2
        logits[..., max(0, vocab_size - vocab_start) :] = max(_NEVER, lowest)
    return logits
