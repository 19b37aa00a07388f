"""Attention back-ends of this package in the registry of a Megatron-Core with the patches of ``patches/megatron-lm``.

Its stock layer specs follow a tree by themselves, and look up the attention that a micro-batch names.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mcore_prefix_tree.attention import BACKENDS, tree_attention
from mcore_prefix_tree.mcore.seam.packed_seq_params import CORE_KNOWS_TREES, convert_metadata


def register() -> None:
    """Add every back-end under its name; a Megatron-Core without the patches has no such registry, and needs none."""
    if not CORE_KNOWS_TREES:
        return
    from megatron.core.transformer.tree_attention import register_tree_attention

    for name in BACKENDS:
        register_tree_attention(name, native_attention(name))


@cache
def native_attention(name: str) -> Any:
    """Return a back-end as Megatron-Core's ``TreeAttention``; one function for each name."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tree_metadata: Any,
        *,
        softmax_scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with ``query`` ``[P, H, D]``, ``key`` ``[P, K, D]``, ``value`` ``[P, K, W]``, ``sinks`` ``[H]``."""
        return tree_attention(
            query,
            key,
            value,
            convert_metadata(tree_metadata),
            softmax_scale=softmax_scale,
            backend=name,
            window=window,
            sinks=sinks,
            deterministic=tree_metadata.deterministic,
        )

    return attention
