"""The definition of tree attention: a dense mask, an explicit softmax, any floating dtype. O(P^2) memory.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import torch

from mcore_prefix_tree.metadata import TreeMetadata


def visibility(metadata: TreeMetadata) -> torch.Tensor:
    """The whole mask, bool ``[P, P]``: entry (i, j) is whether query i sees key j, ``j <= i < subtree_end[j]``."""
    index = torch.arange(metadata.padded_size, device=metadata.subtree_end.device)
    return (index[None, :] <= index[:, None]) & (index[:, None] < metadata.subtree_end[None, :])


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, *, softmax_scale: float
) -> torch.Tensor:
    """``softmax(scale * q k^T, over the visible keys) v``, each group of ``H / K`` query heads sharing a key head.

    Args:
        query: ``[P, H, D]``.
        key: ``[P, K, D]``.
        value: ``[P, K, W]``.
        metadata: of the micro-batch.
        softmax_scale: factor on the scores.

    Returns:
        ``[P, H, W]``.
    """
    group = query.shape[1] // key.shape[1]
    visible = metadata.derived("reference", visibility)
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(group, dim=1)) * softmax_scale
    probabilities = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hij,jhw->ihw", probabilities, value.repeat_interleave(group, dim=1))
