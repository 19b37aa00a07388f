"""Back-end ``cascade``, for CPUs: one causal call of torch's kernel and one full call per depth, merged exactly.

The softmax over all keys of a query is the average of the softmaxes over parts of them, weighted by the exponentials of
their log-sum-exp. The backward of softmax needs nothing else of the forward (Dao, FlashAttention-2, algorithm 2): it
gives every call the *merged* result and log-sum-exp; then the gradients of query add up over the calls, and each
call's gradients of its keys are exact.

A sink is one more part: a score without a value. It joins in the merge.

Legend: P padded tokens, R rows of a call, Q queries, N keys of a call, H query heads, K key/value heads, D head_dim, W
value head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.spans import Int64Array, cut_into_spans
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload

Rows = slice | torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """N runs of queries, each of which attends to a separate run of keys."""

    cu_q: list[int]  # borders of the runs of queries, from 0, N + 1 integers; no run is empty
    cu_k: list[int]  # borders of the runs of keys, likewise
    # Whether query i of a run sees keys 0 to i of its run, which has as many keys; otherwise it sees all keys.
    causal: bool

    @classmethod
    def of(cls, query_lens: Int64Array, key_lens: Int64Array, *, causal: bool) -> Sequences:
        """Make sequences of lengths int64 ``[N]``."""
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]).tolist() for lens in (query_lens, key_lens))
        return cls(cu_q=cu_q, cu_k=cu_k, causal=causal)


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """One full call: rows of the queries that attend and of the keys, ascending, and their sequences."""

    queries: Rows
    keys: Rows
    sequences: Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class CascadePlan:
    """All calls of a micro-batch: the causal one, and full ones, outermost branches first.

    Queries are the tokens from ``unread`` on, keys all T tokens.
    """

    unread: int
    runs: Sequences
    levels: tuple[Level, ...]


def build_plan(metadata: TreeMetadata) -> CascadePlan:
    """Return the calls of a micro-batch, on the device of its metadata."""
    device = metadata.subtree_end.device
    spans = cut_into_spans(metadata)
    run_lens = np.diff(spans.runs)
    unread = int(spans.runs[0])
    return CascadePlan(
        unread=unread,
        runs=Sequences.of(run_lens, run_lens, causal=True),
        levels=tuple(
            _level(spans.queries[spans.depth == depth] - unread, spans.keys[spans.depth == depth], device)
            for depth in range(int(spans.depth.max(initial=-1)) + 1)
        ),
    )


def _level(queries: Int64Array, keys: Int64Array, device: torch.device) -> Level:
    """Make a full call from spans of queries and of keys, int64 ``[N, 2]``."""
    return Level(
        queries=_rows(queries, device),
        keys=_rows(keys, device),
        sequences=Sequences.of(queries[:, 1] - queries[:, 0], keys[:, 1] - keys[:, 0], causal=False),
    )


def _rows(spans: Int64Array, device: torch.device) -> Rows:
    """Spans ``[N, 2]`` as one slice if they touch, so that nothing is gathered, else as int64 indices."""
    if (spans[1:, 0] == spans[:-1, 1]).all():
        return slice(int(spans[0, 0]), int(spans[-1, 1]))
    lens = spans[:, 1] - spans[:, 0]
    rows = np.arange(lens.sum()) + np.repeat(spans[:, 0] - (np.cumsum(lens) - lens), lens)
    return upload(rows.astype(np.int32), device).long()


class QKV(NamedTuple):
    """Query, key and value ``[Q, H, D], [N, K, D], [N, K, W]`` of a call, or their gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Result(NamedTuple):
    """Result of a call: ``out``, ``[Q, H, W]``, and ``lse``, ``[H, Q]``, the natural log-sum-exp in fp32 or better."""

    out: torch.Tensor
    lse: torch.Tensor


def refusal(case: Case) -> str | None:
    """Reject devices other than the CPU, and windows."""
    if case.device.type != "cpu":
        return f"device={case.device.type} (it runs on CPUs)"
    if case.options.window is not None:
        return f"window={case.options.window} (a varlen call shows all queries of a span the same keys)"
    return None


def check(case: Case) -> None:
    """Compare nothing: the kernel is torch's own."""


def plan(metadata: TreeMetadata, case: Case) -> CascadePlan:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    return metadata.derived("cascade", build_plan)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention through torch's kernel for CPUs, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``.

    Saves query, key, value, the result and one number per query and head for backward.
    """
    plan = metadata.derived("cascade", build_plan)
    tokens, width = metadata.num_tokens, value.shape[2]
    # The kernel takes equal widths. Zeros change neither a score nor a result, and autograd cuts them off again.
    dim = max(query.shape[2], width)
    missing = [dim - one.shape[2] for one in (query, key, value)]
    query, key, value = (
        F.pad(one, (0, more)) if more else one for one, more in zip((query, key, value), missing, strict=True)
    )
    # The kernel would take each token of padding for a separate sequence.
    padding = _alone(query[tokens:], key[tokens:], value[tokens:], options)
    unread = min(metadata.unread, tokens)
    if tokens == unread:
        # With a gradient of 0 instead of none: a rank without work takes part in the reductions of all parameters.
        padding = padding + (query[:0].sum() + key[:0].sum())
        return torch.cat([value.new_zeros(unread, *padding.shape[1:]), padding])[..., :width]
    out: torch.Tensor = _CascadeAttention.apply(  # type: ignore[no-untyped-call]
        query[unread:tokens], key[:tokens], value[:tokens], options.sinks, plan, options
    )
    if unread or len(padding):
        out = torch.cat([out.new_zeros(unread, *out.shape[1:]), out, padding])
    return out[..., :width]


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Return ``[P, H, W]`` for tokens that see only themselves: values ``[P, K, W]``, reduced by a sink's share."""
    group = query.shape[1] // key.shape[1]
    out = value.repeat_interleave(group, dim=1)
    if options.sinks is None:
        return out
    wide = torch.promote_types(query.dtype, torch.float32)
    score = torch.linalg.vecdot(query.to(wide), key.repeat_interleave(group, dim=1).to(wide)) * options.softmax_scale
    return (out * torch.sigmoid(score - options.sinks.to(wide))[..., None]).to(value.dtype)


class _CascadeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: CascadePlan,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return ``[Q, H, W]`` for ``[Q, H, D], [T, K, D], [T, K, W]``, the last Q of T tokens, and sinks ``[H]``."""
        qkv = QKV(query, key, value)
        part, lse = _forward(QKV(query, key[plan.unread :], value[plan.unread :]), plan.runs, options)
        out = part.to(_exact(part.dtype)) if plan.levels or sinks is not None else part
        for level in plan.levels:
            part, part_lse = _forward(_select_level(level, qkv), level.sequences, options)
            merged, rows = _take(out, level.queries), _take(lse, level.queries, dim=1)
            both = torch.logaddexp(rows, part_lse)
            merged = _weighted(merged, rows - both) + _weighted(part, part_lse - both)
            _put(out, level.queries, merged)
            _put(lse, level.queries, both, dim=1)
        if sinks is not None:
            both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = _weighted(out, lse - both), both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.plan, ctx.options = plan, options
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        plan: CascadePlan = ctx.plan
        qkv = QKV(query, key, value)
        grad_out = grad_outputs[0].contiguous()
        own, result = QKV(query, key[plan.unread :], value[plan.unread :]), Result(out, lse)
        grad_query, grad_key, grad_value = _backward(grad_out, own, result, plan.runs, ctx.options)
        if plan.unread:
            grad_key, grad_value = (
                torch.cat([grad.new_zeros(plan.unread, *grad.shape[1:]), grad]) for grad in (grad_key, grad_value)
            )
        # One part per level adds to a query's gradient; a key has two parts at most, so its sum is rounded once.
        if plan.levels:
            grad_query = grad_query.to(_exact(query.dtype))
        for level in plan.levels:
            result = Result(_take(out, level.queries), _take(lse, level.queries, dim=1).contiguous())
            rows = _select_level(level, qkv)
            parts = _backward(_take(grad_out, level.queries), rows, result, level.sequences, ctx.options)
            totals = (grad_query, level.queries), (grad_key, level.keys), (grad_value, level.keys)
            for (total, places), part in zip(totals, parts, strict=True):
                _put(total, places, (_take(total, places).to(_exact(total.dtype)) + part).to(total.dtype))
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # The sink's weight w pulls the result towards zero: d out / d sink = -w * out.
            weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            grad_sinks = -(weight * (grad_out.to(lse.dtype) * out).sum(-1).T).sum(1).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None


def _forward(qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
    """Attend within each sequence, ``[Q, H, D], [N, K, D], [N, K, W]``."""
    query, key, value = qkv
    out = query.new_empty(*query.shape[:2], value.shape[2])
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=_exact(query.dtype))
    for q, k in _spans(sequences):
        own = map(_batched, (query[q], key[k], value[k]))
        rows, lse[:, q] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *own, 0.0, sequences.causal, scale=options.softmax_scale
        )
        out[q] = rows[0].transpose(0, 1)
    return Result(out, lse)


def _backward(grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions) -> QKV:
    """Return the gradients for a result that may cover more keys than these; ``grad_out`` is ``[Q, H, W]``."""
    grads = QKV(*map(torch.empty_like, qkv))
    for q, k in _spans(sequences):
        own = map(_batched, (grad_out[q], qkv.query[q], qkv.key[k], qkv.value[k], result.out[q]))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *own, result.lse[None, :, q], 0.0, sequences.causal, scale=options.softmax_scale
        )
        for grad, rows, one in zip(grads, (q, k, k), found, strict=True):
            grad[rows] = one[0].transpose(0, 1)
    return grads


def _spans(sequences: Sequences) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of queries and the rows of keys of each sequence."""
    q, k = sequences.cu_q, sequences.cu_k
    for q_start, q_end, k_start, k_end in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True):
        yield slice(q_start, q_end), slice(k_start, k_end)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: fp32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def _batched(rows: torch.Tensor) -> torch.Tensor:
    """Reshape ``[n, heads, dim]`` to ``[1, heads, n, dim]``."""
    return rows.transpose(0, 1).unsqueeze(0)


def _select_level(level: Level, qkv: QKV) -> QKV:
    return QKV(_take(qkv.query, level.queries), _take(qkv.key, level.keys), _take(qkv.value, level.keys))


def _weighted(part: torch.Tensor, log_weight: torch.Tensor) -> torch.Tensor:
    """Multiply ``[R, H, W]`` by the exponential of ``[H, R]``."""
    return part * torch.exp(log_weight).T[..., None]


def _take(tensor: torch.Tensor, rows: Rows, *, dim: int = 0) -> torch.Tensor:
    """Return the rows of a tensor ``[..., P, ...]`` along a dimension: a view of a slice, else a copy."""
    if isinstance(rows, slice):
        return tensor.narrow(dim, rows.start, rows.stop - rows.start)
    return tensor.index_select(dim, rows)


def _put(tensor: torch.Tensor, rows: Rows, values: torch.Tensor, *, dim: int = 0) -> None:
    """Overwrite the rows of a tensor ``[..., P, ...]`` along a dimension."""
    if isinstance(rows, slice):
        tensor.narrow(dim, rows.start, rows.stop - rows.start).copy_(values)
    else:
        tensor.index_copy_(dim, rows, values)
