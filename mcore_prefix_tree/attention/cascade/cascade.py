"""Tree attention as a cascade: one causal varlen call and one full call per nesting depth, merged exactly.

The softmax over all keys of a query is the average of the softmaxes over parts of them, weighted by the exponentials of
their log-sum-exp. Backward gives every call the *merged* result and log-sum-exp; then the gradients of query add up
over the calls, and each call's gradients of its keys are exact (see ``kernels.py``).

A sink is one more part: a score without a value. It joins in the merge.

Legend: P padded tokens, R rows of a call, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.cascade.cuda import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TorchFlash,
    TransformerEngine,
)
from mcore_prefix_tree.attention.cascade.kernels import QKV, CpuFlash, Result, VarlenKernel, exact
from mcore_prefix_tree.attention.cascade.sequences import CascadePlan, Level, Rows, Sequences, build_plan
from mcore_prefix_tree.attention.parity import Attention, check_parity, check_size
from mcore_prefix_tree.metadata import TreeMetadata

# In the order of preference: the fastest first.
CUDA_KERNELS: tuple[VarlenKernel, ...] = (
    FlashAttention3(),
    FlashAttention4(),
    TransformerEngine(),
    FlashAttention2(),
    TorchFlash(),
)
CPU_KERNELS: tuple[VarlenKernel, ...] = (CpuFlash(),)


def list_kernels(device: torch.device) -> tuple[VarlenKernel, ...]:
    """The kernels for a device, fastest first, installed or not."""
    return CPU_KERNELS if device.type == "cpu" else CUDA_KERNELS


def choose_kernel(case: Case) -> VarlenKernel | None:
    """Return the fastest kernel that supports a case; None if none does.

    A kernel without a backward for the case comes last even if no backward is needed: activation recompute runs the
    forward first without and then with gradients, and both have to be the same kernel's.
    """
    for needs_grad in (True, case.needs_grad):
        asked = replace(case, needs_grad=needs_grad)
        for kernel in list_kernels(case.device):
            if kernel.refusal(asked) is None:
                return kernel
    return None


def refusal(case: Case) -> str | None:
    """Reject windows, and cases that no varlen kernel of the device supports."""
    window = _window_refusal(case)
    if window is not None or choose_kernel(case) is not None:
        return window
    *others, always_there = list_kernels(case.device)
    reasons = [f"{kernel.name}: {kernel.refusal(case)}" for kernel in others]
    return f"{always_there.refusal(case)} with the varlen kernel of {always_there.name} ({'; '.join(reasons)})"


def refusal_through(kernel: VarlenKernel, case: Case) -> str | None:
    """Reject windows, and cases that a kernel does not support."""
    return _window_refusal(case) or kernel.refusal(case)


def _window_refusal(case: Case) -> str | None:
    if case.options.window is None:
        return None
    return f"window={case.options.window} (a varlen call shows all queries of a span the same keys)"


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention through the fastest varlen kernel there is, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``.

    Saves query, key, value, the result and one fp32 number per query and head for backward. A GPU's kernel is compared
    with the reference on first use, because its statistics are not part of its public interface, and raises ParityError
    if wrong.
    """
    return attention_through(_checked(Case.of(query, key, value, options)), query, key, value, metadata, options)


def plan(metadata: TreeMetadata, case: Case) -> CascadePlan:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    return metadata.derived("cascade", build_plan)


def check(case: Case) -> None:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    _checked(case)


def _checked(case: Case) -> VarlenKernel:
    """Return the kernel of a case, compared with the reference if it is one of a GPU."""
    kernel = choose_kernel(case)
    assert kernel is not None, "refused before"
    if case.device.type == "cuda":
        check_parity(f"cascade, {kernel.name}", _through(kernel), case)
    return kernel


@cache
def _through(kernel: VarlenKernel) -> Attention:
    return partial(attention_through, kernel)


def attention_through(
    kernel: VarlenKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """Run :func:`attention`, with its shapes ``[P, H, D]``, through a kernel; see :func:`refusal_through`."""
    plan = metadata.derived("cascade", build_plan)
    tokens, width = metadata.num_tokens, value.shape[2]
    if kernel.head_dim_multiple is not None:
        # Zeros change neither a score nor a result, and autograd cuts them off again.
        dim = -(-max(query.shape[2], width) // kernel.head_dim_multiple) * kernel.head_dim_multiple
        query, key, value = (_widened(one, dim) for one in (query, key, value))
    # A kernel would take each token of padding for a separate sequence.
    padding = _alone(query[tokens:], key[tokens:], value[tokens:], options)
    if query.is_cuda:
        check_size(f"the attention kernel of {kernel.name}", query)
    unread = min(metadata.unread, tokens)
    if tokens == unread:
        # With a gradient of 0 instead of none: a rank without work takes part in the reductions of all parameters.
        padding = padding + (query[:0].sum() + key[:0].sum())
        return torch.cat([value.new_zeros(unread, *padding.shape[1:]), padding])[..., :width]
    out: torch.Tensor = _CascadeAttention.apply(  # type: ignore[no-untyped-call]
        query[unread:tokens], key[:tokens], value[:tokens], options.sinks, plan, kernel, options
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


def _widened(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor ``[..., n]`` zero-padded to ``[..., dim]``."""
    missing = dim - tensor.shape[2]
    return F.pad(tensor, (0, missing)) if missing else tensor


class _CascadeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: CascadePlan,
        kernel: VarlenKernel,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return ``[Q, H, W]`` for ``[Q, H, D], [T, K, D], [T, K, W]``, the last Q of T tokens, and sinks ``[H]``."""
        qkv = QKV(query, key, value)
        part, lse = _forward(kernel, QKV(query, key[plan.unread :], value[plan.unread :]), plan.runs, options)
        assert lse.shape == (query.shape[1], query.shape[0]), f"{kernel.name} returned statistics {tuple(lse.shape)}"
        out = part.to(exact(part.dtype)) if plan.levels or sinks is not None else part
        for level in plan.levels:
            part, part_lse = _forward(kernel, _select_level(level, qkv), level.sequences, options)
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
        ctx.plan, ctx.kernel, ctx.options = plan, kernel, options
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        plan: CascadePlan = ctx.plan
        qkv = QKV(query, key, value)
        grad_out = grad_outputs[0].contiguous()
        own, result = QKV(query, key[plan.unread :], value[plan.unread :]), Result(out, lse)
        grad_query, grad_key, grad_value = _backward(ctx.kernel, grad_out, own, result, plan.runs, ctx.options)
        if plan.unread:
            grad_key, grad_value = (
                torch.cat([grad.new_zeros(plan.unread, *grad.shape[1:]), grad]) for grad in (grad_key, grad_value)
            )
        # One part per level adds to a query's gradient; a key has two parts at most, so its sum is rounded once.
        if plan.levels:
            grad_query = grad_query.to(exact(query.dtype))
        for level in plan.levels:
            result = Result(_take(out, level.queries), _take(lse, level.queries, dim=1).contiguous())
            rows = _select_level(level, qkv)
            parts = _backward(ctx.kernel, _take(grad_out, level.queries), rows, result, level.sequences, ctx.options)
            totals = (grad_query, level.queries), (grad_key, level.keys), (grad_value, level.keys)
            for (total, places), part in zip(totals, parts, strict=True):
                _put(total, places, (_take(total, places).to(exact(total.dtype)) + part).to(total.dtype))
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # The sink's weight w pulls the result towards zero: d out / d sink = -w * out.
            weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            grad_sinks = -(weight * (grad_out.to(lse.dtype) * out).sum(-1).T).sum(1).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None, None


def _forward(kernel: VarlenKernel, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
    """Call a kernel, ``[R, H, D], [R, K, D], [R, K, W]``, on its tensors' device: not all kernels switch to it."""
    with torch.cuda.device_of(qkv.query):
        return kernel.forward(qkv, sequences, options)


def _backward(
    kernel: VarlenKernel,
    grad_out: torch.Tensor,
    qkv: QKV,
    result: Result,
    sequences: Sequences,
    options: AttentionOptions,
) -> QKV:
    """Return the gradients ``[R, H, D], [R, K, D], [R, K, W]`` of one call for ``[R, H, W]``."""
    with torch.cuda.device_of(qkv.query):
        return kernel.backward(grad_out, qkv, result, sequences, options)


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
