"""Megatron-Core's own attention for heads whose queries and values differ in size, which it takes from none but others.

``MultiLatentAttention`` tells its core attention both sizes, which TransformerEngine's takes. ``DotProductAttention``
computes with them as they come, but does not take them and assumes the size of its output.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """``DotProductAttention`` that may be told how wide the queries and values of a head are."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As the base class.

        Args:
            config: of the model.
            layer_number: from 1.
            *args: further ones of the base class.
            k_channels: of a head's queries and keys. Their scale, which depends on it, is an argument of its own.
            v_channels: of a head's values.
            **kwargs: further ones of the base class.
        """
        super().__init__(config, layer_number, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
