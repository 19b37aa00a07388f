"""Megatron-Core's own attention for heads whose queries and values differ in size.

``MultiLatentAttention`` gives its core attention both sizes. ``DotProductAttention`` computes with any sizes, but has
no arguments for them and assumes the size of its output.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """``DotProductAttention`` with arguments for the sizes of a head; the scale has an argument of its own."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
