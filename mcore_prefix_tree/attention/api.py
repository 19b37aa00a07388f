"""The one entrance to tree attention: validates, then hands over to the back-end that the caller names."""

from __future__ import annotations

from typing import Protocol

import torch

from mcore_prefix_tree.attention.path import path_attention
from mcore_prefix_tree.attention.reference import reference_attention
from mcore_prefix_tree.metadata import TreeMetadata


class Backend(Protocol):
    """What a back-end is: a function with the arguments and the result of ``reference_attention``."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TreeMetadata,
        *,
        softmax_scale: float,
    ) -> torch.Tensor:
        """See ``reference_attention``."""


BACKENDS: dict[str, Backend] = {"path": path_attention, "reference": reference_attention}


def check_backend(name: str) -> None:
    """Raise ValueError, naming the ones there are, if ``name`` is not a back-end."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} does not exist; choose one of {', '.join(sorted(BACKENDS))}")


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    *,
    softmax_scale: float,
    backend: str = "path",
) -> torch.Tensor:
    """Attention in which every token sees its own path: query i sees key j if ``j <= i < subtree_end[j]``.

    Args:
        query: ``[P, H, D]``, P the padded size of the micro-batch.
        key: ``[P, K, D]``; K divides H, each key head serves H / K consecutive query heads.
        value: ``[P, K, W]``.
        metadata: of the micro-batch.
        softmax_scale: factor on the scores before the softmax.
        backend: a key of :data:`BACKENDS`.

    Returns:
        ``[P, H, W]``, in the query's dtype.

    Raises:
        ValueError: if a shape does not fit the metadata or the others, or the back-end does not exist.
    """
    check_backend(backend)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 3:
        raise ValueError(f"tree attention takes [tokens, heads, head_dim] tensors, not {shapes}")
    if not query.shape[0] == key.shape[0] == value.shape[0] == metadata.padded_size:
        raise ValueError(f"{shapes} must all have the {metadata.padded_size} tokens of the tree metadata")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
        raise ValueError(f"the heads or head dimensions of {shapes} do not fit together")
    return BACKENDS[backend](query, key, value, metadata, softmax_scale=softmax_scale)
