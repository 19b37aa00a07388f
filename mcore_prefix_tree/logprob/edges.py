"""Log-probability of every edge (predictor, token) from vocabulary-parallel logits, each row of logits read once.

A token is scored by its predictor. At a branch point several tokens have the same predictor, so one row of logits
serves several edges and its gradient is their sum:

    log p(e)         = logits[predictor(e), token(e)] - logsumexp(logits[predictor(e)])
    d / d logits[i]  = sum over e with predictor i of g(e) * (onehot(token(e)) - softmax(logits[i]))

and for the entropy H_i = logsumexp_i - sum_v p_iv logits_iv of a row:  d H_i / d logits_iv = -p_iv (log p_iv + H_i).

Legend: P padded tokens, E edges, V vocabulary, Vl its part on this tensor-parallel rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_prefix_tree.layout import FlatLayout

# Rows of logits in fp32 at a time: bounds the temporary memory at ROWS * Vl.
ROWS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """The edges of a layout, in the order of their predictors.

    Attributes:
        predictor: int64 tensor ``[E]``, flat index of the token that predicts.
        token: int64 tensor ``[E]``, flat index of the token that is predicted.
        token_id: int64 tensor ``[E]``, its id in the vocabulary.
        padded_size: P.
        block_edges: for every block of ``ROWS`` rows, the slice of the edges that its rows predict.
    """

    predictor: torch.Tensor
    token: torch.Tensor
    token_id: torch.Tensor
    padded_size: int
    block_edges: list[slice]

    @classmethod
    def from_layout(cls, layout: FlatLayout, *, device: torch.device | str = "cpu") -> Edges:
        """Every physical token that is not the first of a root."""
        token = np.flatnonzero(layout.predictor >= 0)
        token = token[np.argsort(layout.predictor[token], kind="stable")]
        borders = np.searchsorted(layout.predictor[token], np.arange(0, layout.padded_size + ROWS, ROWS)).tolist()
        return cls(
            predictor=torch.from_numpy(layout.predictor[token].astype(np.int64)).to(device),
            token=torch.from_numpy(token).to(device),
            token_id=torch.from_numpy(layout.input_ids[token]).to(device),
            padded_size=layout.padded_size,
            block_edges=[slice(start, end) for start, end in itertools.pairwise(borders)],
        )


def _row_blocks(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of rows in fp32, or in the logits' own dtype if that is wider."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    for start in range(0, logits.shape[0], ROWS):
        rows = slice(start, min(start + ROWS, logits.shape[0]))
        yield rows, logits[rows].to(dtype)


class _EdgeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        edges: Edges,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        in_place: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logsumexp = logits.new_empty(logits.shape[0], dtype=dtype)
        entropy = torch.empty_like(logsumexp) if with_entropy else None
        for rows, block in _row_blocks(logits):
            if entropy is None:
                logsumexp[rows] = torch.logsumexp(block, dim=1)
            else:
                # Relative to the maximum, not to the logsumexp: a near-certain row keeps the digits of its entropy.
                row_max = block.amax(dim=1)
                shifted = block - row_max[:, None]
                exp = shifted.exp()
                total = exp.sum(dim=1)
                logsumexp[rows] = row_max + total.log()
                entropy[rows] = total.log() - torch.linalg.vecdot(exp, shifted) / total
        here, column = _on_this_rank(edges, vocab_start, logits.shape[1])
        target = torch.where(here, logits[edges.predictor, column].to(dtype), 0)
        if group is not None:
            logsumexp, entropy = _over_ranks(logsumexp, entropy, group)
            dist.all_reduce(target, group=group)
        ctx.save_for_backward(logits, logsumexp, entropy)
        ctx.edges, ctx.vocab_start, ctx.in_place = edges, vocab_start, in_place
        return target - logsumexp[edges.predictor], entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logprob, grad_entropy = grad_outputs
        logits, logsumexp, entropy = ctx.saved_tensors
        edges: Edges = ctx.edges
        per_row = torch.zeros_like(logsumexp).index_add_(0, edges.predictor, grad_logprob).neg_()
        here, column = _on_this_rank(edges, ctx.vocab_start, logits.shape[1])
        at_target = torch.where(here, grad_logprob, 0)
        grad = logits if ctx.in_place else torch.empty_like(logits)
        for (rows, block), owned in zip(_row_blocks(logits), edges.block_edges, strict=True):
            # In the block's own precision, the gradient's or wider: what a target loses to rounding stays lost.
            block_grad = grad[rows] if grad.dtype == block.dtype else torch.empty_like(block)
            log_prob = torch.sub(block, logsumexp[rows, None], out=block_grad)
            if entropy is None:
                log_prob.exp_().mul_(per_row[rows, None])
            else:
                weight = per_row[rows, None] - grad_entropy[rows, None] * (log_prob + entropy[rows, None])
                log_prob.exp_().mul_(weight)
            place = (edges.predictor[owned] - rows.start, column[owned])
            block_grad.index_put_(place, at_target[owned], accumulate=True)
            if block_grad.dtype != grad.dtype:
                grad[rows] = block_grad
        return grad, None, None, None, None, None


def _over_ranks(
    logsumexp: torch.Tensor, entropy: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join what each rank knows of its own columns.

    Rank r holds the share ``w_r = exp(logsumexp_r - logsumexp)`` of a row's probability, and the row's entropy is
    ``sum_r w_r (H_r + logsumexp - logsumexp_r)``.
    """
    largest = logsumexp.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    relative = logsumexp - largest
    share = relative.exp()
    sums = torch.stack([share] if entropy is None else [share, share * (entropy - relative)])
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    return largest + log_sum, None if entropy is None else sums[1] / sums[0] + log_sum


def _on_this_rank(edges: Edges, vocab_start: int, local_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each edge's token is in this rank's part of the vocabulary, and its column there (clamped if not)."""
    column = edges.token_id - vocab_start
    return (column >= 0) & (column < local_size), column.clamp(0, local_size - 1)


def edge_logprobs(
    logits: torch.Tensor,
    edges: Edges,
    *,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Log-probability of every token given its path.

    Args:
        logits: ``[P, Vl]``, this rank's columns, in any floating dtype; reductions are in fp32 or better.
        edges: of the layout that the logits come from.
        vocab_start: id of the first column.
        group: tensor-parallel group over which the vocabulary is split, None if it is not.
        in_place: let backward put the gradient where the logits are, which halves the peak. For logits that nobody
            reads afterwards; autograd refuses a second backward.

    Returns:
        ``[P]`` in nats, at each token's own flat index; 0 where nothing predicts the token. Equal on all ranks of the
        group, fp32 or better.

    Raises:
        ValueError: if the logits are not ``[padded_size, Vl]``.
    """
    logprob, _ = _score(logits, edges, vocab_start, group, with_entropy=False, in_place=in_place)
    return logprob


def edge_logprobs_and_entropy(
    logits: torch.Tensor, edges: Edges, *, vocab_start: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`edge_logprobs`, and the entropy ``[P]`` in nats of the distribution that each token predicts."""
    logprob, entropy = _score(logits, edges, vocab_start, group, with_entropy=True, in_place=False)
    assert entropy is not None
    return logprob, entropy


def _score(
    logits: torch.Tensor,
    edges: Edges,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    *,
    with_entropy: bool,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if logits.ndim != 2 or logits.shape[0] != edges.padded_size:
        raise ValueError(f"logits must be [{edges.padded_size}, vocabulary], not {list(logits.shape)}")
    per_edge, entropy = _EdgeLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, edges, vocab_start, group, with_entropy, in_place
    )
    return per_edge.new_zeros(edges.padded_size).index_put((edges.token,), per_edge), entropy
