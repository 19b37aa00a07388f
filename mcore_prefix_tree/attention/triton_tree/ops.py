"""The kernels as PyTorch operators, so that they can be traced, recomputed and differentiated.

Legend: P padded tokens, R P in full blocks, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2
from typing import Any

import torch

from mcore_prefix_tree.attention.triton_tree import kernel_calls
from mcore_prefix_tree.attention.triton_tree.config import Configs
from mcore_prefix_tree.attention.triton_tree.kernel_calls import Call, readable


@torch.library.custom_op("mcore_prefix_tree::tree_attention", mutates_args=())
def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    end: torch.Tensor,
    position: torch.Tensor,
    schedules: Sequence[torch.Tensor],
    configs: Sequence[int],
    softmax_scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tree attention, ``[P, H, D], [P, K, D], [P, K, W]``, sinks ``[H]`` or None.

    Args:
        end, position: int32 ``[R]``, fields of a ``DevicePlan``.
        schedules: schedules of the same plan, which was made for these configs.
        configs: packed ``Configs``.
        softmax_scale, window: see ``AttentionOptions``.

    Returns:
        out ``[P, H, W]``, and the fp32 ``[H, R]`` log-sum-exps of the logits in units of log 2, infinite past P.
    """
    call = Call(configs=Configs.unpack(configs), end=end, position=position, softmax_scale=softmax_scale, window=window)
    query, key, value = readable(query), readable(key), readable(value)
    return kernel_calls.forward(query, key, value, sinks, schedules[0], call)


@tree_attention.register_fake
def _(query: Any, key: Any, value: Any, sinks: Any, end: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size, heads, _ = query.shape
    lse = query.new_empty((heads, end.shape[0]), dtype=torch.float32)
    return query.new_empty((size, heads, value.shape[2])), lse


@torch.library.custom_op("mcore_prefix_tree::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    end: torch.Tensor,
    position: torch.Tensor,
    schedules: Sequence[torch.Tensor],
    configs: Sequence[int],
    softmax_scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, dK and dV, contiguous, and fp32 ``[H, R]``: ``sum(out * grad_out)`` of each row, zero past P."""
    call = Call(configs=Configs.unpack(configs), end=end, position=position, softmax_scale=softmax_scale, window=window)
    query, key, value, grad_out = readable(query), readable(key), readable(value), readable(grad_out)
    delta = kernel_calls.row_sums(out, grad_out, call)
    inputs = (query, key, value, grad_out, lse, delta)
    grad_key, grad_value = kernel_calls.key_value_grads(*inputs, schedules[1], call)
    return kernel_calls.query_grads(*inputs, schedules[2], call), grad_key, grad_value, delta


@tree_attention_backward.register_fake
def _(grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    return (*(like.new_empty(like.shape) for like in (query, key, value)), torch.empty_like(lse))


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save for backward the inputs, out ``[P, H, W]`` and log-sum-exps ``[H, R]``.

    The operator may be another than :func:`tree_attention`: one with the same results and arguments, and more of both
    schedules and settings behind them.
    """
    query, key, value, sinks, end, position, schedules, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, end, position, *schedules)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, grad_out: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    """Return the gradients of the inputs for that of out, ``[P, H, W]``."""
    query, key, value, sinks, out, lse, end, position, *schedules = ctx.saved_tensors
    of_settings = (None, None, [None] * len(schedules), *(None for _ in ctx.settings))
    if grad_out is None:
        return None, None, None, None, *of_settings
    grad_query, grad_key, grad_value, delta = tree_attention_backward(
        grad_out, query, key, value, out, lse, end, position, schedules, *ctx.settings[:3]
    )
    grad_sinks = None
    if sinks is not None:
        # A sink's weight in each row is exp(sink - lse), zero past P; its value is zero, so its gradient is -delta.
        weight = torch.exp2(sinks.float()[:, None] * log2(e) - lse)
        grad_sinks = -(weight * delta).sum(1).to(sinks.dtype)
    return grad_query, grad_key, grad_value, grad_sinks, *of_settings


tree_attention.register_autograd(differentiate, setup_context=save)
