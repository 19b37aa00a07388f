"""Tree attention segment by segment: a segment's queries attend to the keys of their own path, through SDPA.

Segments come in depth-first pre-order, so one buffer as long as the longest path always holds the keys of the current
path: a segment writes its own rows at its depth and finds its ancestors' rows already there. Every key is copied once
per pass, never once per descendant, and memory stays O(P). Backward runs the same way and recomputes each block; the
gradient of a path's keys gathers in a second such buffer, and a segment's rows are final once its subtree is done.

Only visible pairs are computed, except for the upper triangle of a query block's own columns (at most half a block per
query).

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim, C query block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case, without_autocast
from mcore_prefix_tree.metadata import TreeMetadata

# Large enough for the matrix products to be efficient, small enough for the masked triangle and its bias to be cheap.
QUERY_BLOCK = 256


class _Fused(NamedTuple):
    """Parts for which SDPA may choose a fused kernel: causal attention within a root, and windows of the bias."""

    roots: bool
    windows: bool


class _Segment(NamedTuple):
    """Flat tokens ``start:end`` at path positions ``depth:depth + end - start``."""

    start: int
    end: int
    depth: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _PathPlan:
    """Python integers for the loops: non-empty segments in pre-order, the start of the padding, and ``unread``."""

    segments: list[_Segment]
    num_tokens: int
    unread: int
    max_path_len: int


def _build_plan(metadata: TreeMetadata) -> _PathPlan:
    cu_lens = metadata.segments.cu_lens.tolist()
    segments = [
        _Segment(start, end, depth)
        for start, end, depth in zip(cu_lens[:-1], cu_lens[1:], metadata.segments.depth.tolist(), strict=True)
        if start < end <= metadata.num_tokens
    ]
    return _PathPlan(
        segments=segments, num_tokens=metadata.num_tokens, unread=metadata.unread, max_path_len=metadata.max_path_len
    )


class _Block(NamedTuple):
    """Queries ``start:end`` of one segment, which see the path's first ``keys``; ``is_whole`` roots need no bias."""

    start: int
    end: int
    keys: int
    is_whole: bool


def _blocks(segment: _Segment, fused: _Fused, unread: int) -> Iterator[_Block]:
    if segment.depth == 0 and fused.roots and segment.start >= unread:
        # Plain causal attention: SDPA has a kernel for it that needs neither bias nor blocks. Its matrix products need
        # them no less than elsewhere: a root's scores would be quadratic in its length.
        yield _Block(segment.start, segment.end, segment.end - segment.start, True)
        return
    for start in range(max(segment.start, unread), segment.end, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, segment.end)
        yield _Block(start, end, segment.depth + end - segment.start, False)


def _causal_bias(plan: _PathPlan, like: torch.Tensor) -> torch.Tensor:
    """``[C, max_path_len + C]`` additive bias, of which every block's bottom-right causal bias is a window."""
    rows = min(QUERY_BLOCK, plan.max_path_len)
    bias = like.new_zeros(rows, plan.max_path_len + rows)
    bias[:, plan.max_path_len :].copy_(torch.triu(bias.new_full((rows, rows), float("-inf")), diagonal=1))
    return bias


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: _Block,
    bias: torch.Tensor,
    scale: float,
    fused: _Fused,
) -> torch.Tensor:
    """One block, ``[rows, H, D] x [keys, K, D] x [keys, K, W] -> [rows, H, W]``."""
    rows = block.end - block.start
    causal_from = bias.shape[1] - bias.shape[0]
    with nullcontext() if block.is_whole or fused.windows else sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            attn_mask=None if block.is_whole else bias[:rows, causal_from + rows - block.keys : causal_from + rows],
            is_causal=block.is_whole,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.squeeze(0).transpose(0, 1)


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: _PathPlan,
        scale: float,
        fused: _Fused,
    ) -> torch.Tensor:
        """Return ``[P, H, W]`` for ``[P, H, D], [P, K, D], [P, K, W]``."""
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.scale, ctx.fused = plan, scale, fused
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        # A padding token sees only itself, with weight one.
        out[plan.num_tokens :] = value[plan.num_tokens :].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        path_key = key.new_empty(plan.max_path_len, *key.shape[1:])
        path_value = value.new_empty(plan.max_path_len, *value.shape[1:])
        bias = _causal_bias(plan, query)
        for segment in plan.segments:
            start, end, depth = segment
            path_key[depth : depth + end - start] = key[start:end]
            path_value[depth : depth + end - start] = value[start:end]
            for block in _blocks(segment, fused, plan.unread):
                out[block.start : block.end] = _attend(
                    query[block.start : block.end],
                    path_key[: block.keys],
                    path_value[: block.keys],
                    block,
                    bias,
                    scale,
                    fused,
                )
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_out,) = grad_outputs
        query, key, value = ctx.saved_tensors
        plan: _PathPlan = ctx.plan
        grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.empty_like(value)
        padding = grad_out[plan.num_tokens :]
        grad_value[plan.num_tokens :] = padding.unflatten(1, (key.shape[1], -1)).sum(dim=2)
        path_key = key.new_empty(plan.max_path_len, *key.shape[1:])
        path_value = value.new_empty(plan.max_path_len, *value.shape[1:])
        # Many blocks add to one key's gradient: bf16 and fp16 would lose the small ones.
        sum_dtype = torch.promote_types(key.dtype, torch.float32)
        path_grad_key = torch.zeros_like(path_key, dtype=sum_dtype)
        path_grad_value = torch.zeros_like(path_value, dtype=sum_dtype)
        bias = _causal_bias(plan, query)

        def close(segment: _Segment) -> None:
            """Take the gradient of a finished segment out of the buffers and leave zeros for its sibling."""
            start, end, depth = segment
            rows = slice(depth, depth + end - start)
            grad_key[start:end] = path_grad_key[rows]
            grad_value[start:end] = path_grad_value[rows]
            path_grad_key[rows] = 0
            path_grad_value[rows] = 0

        open_path: list[_Segment] = []
        for segment in plan.segments:
            start, end, depth = segment
            while open_path and open_path[-1].depth >= depth:
                close(open_path.pop())
            open_path.append(segment)
            path_key[depth : depth + end - start] = key[start:end]
            path_value[depth : depth + end - start] = value[start:end]
            for block in _blocks(segment, ctx.fused, plan.unread):
                block_query, block_key, block_value = (
                    rows.detach().requires_grad_()
                    for rows in (query[block.start : block.end], path_key[: block.keys], path_value[: block.keys])
                )
                with torch.enable_grad(), without_autocast(query.device):
                    out = _attend(block_query, block_key, block_value, block, bias, ctx.scale, ctx.fused)
                grads = torch.autograd.grad(
                    out, (block_query, block_key, block_value), grad_out[block.start : block.end]
                )
                grad_query[block.start : block.end] = grads[0]
                path_grad_key[: block.keys] += grads[1]
                path_grad_value[: block.keys] += grads[2]
        while open_path:
            close(open_path.pop())
        return grad_query, grad_key, grad_value, None, None, None


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention over each segment's own path, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``.

    Saves query, key and value for backward, nothing per pair. Gradients of shared keys are summed in fp32 or better.
    """
    plan = metadata.derived("path", _build_plan)
    fused = _fused(query.device, deterministic=options.deterministic)
    out: torch.Tensor = _PathAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, plan, options.softmax_scale, fused
    )
    return out


def _fused(device: torch.device, *, deterministic: bool) -> _Fused:
    if device.type == "cpu":
        return _Fused(roots=True, windows=True)
    # SDPA's fused backward kernels on a GPU add up in any order, and read a mask in aligned vectors, but a window of
    # the bias begins at any column. Its plain matrix products do neither.
    return _Fused(roots=not deterministic, windows=False)


def plan(metadata: TreeMetadata, case: Case) -> object:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    return metadata.derived("path", _build_plan)


def check(case: Case) -> None:
    """Compare nothing: SDPA is torch's own."""


def refusal(case: Case) -> str | None:
    """Refuse sinks, which SDPA lacks, and windows: the blocks here reach back to the root of the path."""
    options = case.options
    if options.sinks is not None:
        return "sinks (SDPA has none)"
    if options.window is not None:
        return f"window={options.window} (its blocks reach back to the root of the path)"
    return None
