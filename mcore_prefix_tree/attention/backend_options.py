"""Options of tree attention in addition to the tensors, and the description of a call that back-ends judge.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from mcore_prefix_tree.utils.lazy_torch import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOptions:
    """The mathematics of a call: ``softmax(scale * q k^T, over the visible keys and the sink) v``."""

    softmax_scale: float
    window: int | None = None  # number of keys that a query sees, itself included, counted in positions on its path
    # Floating [H], a learned logit per head that joins the softmax's denominator and has no value. It is not scaled,
    # and it receives a gradient.
    sinks: torch.Tensor | None = None
    # Whether forward and backward must give the same bits twice, which the fastest kernels do not.
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One call for a back-end's ``refusal``, without token counts, so that a run is rejected before its first step."""

    device: torch.device
    capability: tuple[int, int] | None  # compute capability of a CUDA device, for example (9, 0); None elsewhere
    dtype: torch.dtype
    # heads, kv_heads, head_dim, value_dim: H, K, D and W.
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    needs_grad: bool  # whether backward will be called
    options: AttentionOptions

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> Case:
        """The case of ``[P, H, D]``, ``[P, K, D]`` and ``[P, K, W]``."""
        device = query.device
        capability = None
        if device.type == "cuda":
            from mcore_prefix_tree.attention.capability import get_capability

            capability = get_capability(device)
        return cls(
            device=device,
            capability=capability,
            dtype=query.dtype,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[2],
            needs_grad=torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)),
            options=options,
        )


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_inputs(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast floating tensors as autocast casts the inputs of SDPA, if it is on: to its dtype, except float64."""
    if not autocasts(tensors[0].device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [one if one.dtype == torch.float64 else one.to(dtype) for one in tensors]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations on a device keep the dtypes of their inputs."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()
