"""Attention for packed rows on a CPU: upstream has none but TransformerEngine's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F


class PackedAttention(torch.nn.Module):
    """Causal core attention for packed rows, one call of torch's scaled dot-product attention for each row.

    It replaces ``TEDotProductAttention`` in local layers; construction raises NotImplementedError for dropout, a
    sliding window or an unusual softmax.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.config = config
        for name, usual in (("attention_dropout", 0), ("window_size", None), ("softmax_type", "vanilla")):
            if getattr(config, name, usual) != usual:
                raise NotImplementedError(f"PackedAttention does not support {name}={getattr(config, name)!r}")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return ``[T, heads * size]`` for ``[T, heads, size]``, with padding; ``[n, b, ...]`` without packing."""
        if packed_seq_params is None:
            rows = [self._attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)))]
            return rows[0].permute(2, 0, 1, 3).flatten(2)
        params, rows = packed_seq_params, []
        slots = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        for start, end in pairwise(slots.tolist()):
            # Torch's fused kernel takes four dimensions only.
            parts = (part[start:end].transpose(0, 1).unsqueeze(0) for part in (query, key, value))
            rows.append(self._attend(*parts).squeeze(0).transpose(0, 1))
        return torch.cat(rows).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return ``[n, b, heads * size]`` for ``[n, b, heads, size]``."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
