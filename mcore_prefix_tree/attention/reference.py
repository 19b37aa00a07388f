"""The definition of tree attention: a dense mask, an explicit softmax, any floating dtype. O(P^2) memory.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import torch

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.metadata import TreeMetadata


def visibility(metadata: TreeMetadata) -> torch.Tensor:
    """Return the mask, bool ``[P, P]``: entry (i, j) is whether query i sees key j, ``j <= i < subtree_end[j]``."""
    index = torch.arange(metadata.padded_size, device=metadata.subtree_end.device)
    return (index[None, :] <= index[:, None]) & (index[:, None] < metadata.subtree_end[None, :])


def window_visibility(metadata: TreeMetadata, window: int) -> torch.Tensor:
    """bool ``[P, P]``: entry (i, j) is whether key j is less than ``window`` positions above query i."""
    position = metadata.tree_position_ids
    return position[:, None] - position[None, :] < window


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """``softmax(scale * q k^T, over the visible keys) v``, each group of ``H / K`` query heads sharing a key head.

    ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``.
    """
    group = query.shape[1] // key.shape[1]
    visible = metadata.derived("reference", visibility)
    if options.window is not None:
        visible = visible & window_visibility(metadata, options.window)
    # The scale comes first: products of float16 may exceed its range without it.
    scores = torch.einsum("ihd,jhd->hij", query * options.softmax_scale, key.repeat_interleave(group, dim=1))
    scores = scores.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        # One more key that everybody sees and that has no value.
        sink = options.sinks.to(scores.dtype)[:, None, None].expand(-1, len(visible), 1)
        probabilities = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    return torch.einsum("hij,jhw->ihw", probabilities, value.repeat_interleave(group, dim=1))


def plan(metadata: TreeMetadata, case: Case) -> object:
    """Make nothing ahead: the mask is dense, and made on the device."""
    return None


def check(case: Case) -> None:
    """Compare nothing: this is the reference."""


def refusal(case: Case) -> str | None:
    """Refuse nothing: all others are measured against this."""
    return None
