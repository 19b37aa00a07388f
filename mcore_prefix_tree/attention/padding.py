"""Padding tokens, for kernels that would take each of them for a sequence of its own.

Legend: P padded tokens, T tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcore_prefix_tree.attention.options import AttentionOptions
from mcore_prefix_tree.metadata import TreeMetadata


def apart_from_padding(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``, of which ``attend`` makes the first T rows from these alone."""
    tokens = metadata.num_tokens
    if tokens == metadata.padded_size:
        return attend(query, key, value)
    padding = _alone(query[tokens:], key[tokens:], value[tokens:], options)
    if not tokens:
        # With a gradient of 0 instead of none: a rank without work takes part in the reductions of all parameters.
        return padding + (query[:0].sum() + key[:0].sum())
    return torch.cat([attend(query[:tokens], key[:tokens], value[:tokens]), padding])


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Of tokens that see nothing but themselves: their values, of which a sink takes its share."""
    group = query.shape[1] // key.shape[1]
    out = value.repeat_interleave(group, dim=1)
    if options.sinks is None:
        return out
    wide = torch.promote_types(query.dtype, torch.float32)
    score = torch.linalg.vecdot(query.to(wide), key.repeat_interleave(group, dim=1).to(wide)) * options.softmax_scale
    return (out * torch.sigmoid(score - options.sinks.to(wide))[..., None]).to(value.dtype)
