"""Tree attention through torch's FlexAttention: a block mask made from our lists, compiled once for all lengths.

``create_block_mask`` would evaluate the mask for every pair, but the tree already determines which blocks meet.
FlexAttention requires square lists, so this back-end holds ``16 * (P / 128)^2`` bytes: 21 MB at 147 k tokens.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.tile_blocks import Tiles, block_plan
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload

# FlexAttention's own default: a multiple of its tile sizes.
BLOCK = 128

Mod = Callable[..., torch.Tensor]


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> Any:
    """Call FlexAttention on ``[1, H, P, D], [1, K, P, D], [1, K, P, W]``."""
    return torch_flex.flex_attention(query, key, value, **arguments)


@cache
def _compiled(*configuration: object) -> Any:
    """Return FlexAttention compiled for one configuration, in a copy: torch stops after eight versions of one."""
    own = FunctionType(_flex.__code__.replace(co_name="flex_attention"), _flex.__globals__)
    # Without fullgraph, torch would give up compiling after a number of shapes and attend to every pair, quietly.
    return torch.compile(own, dynamic=True, fullgraph=True)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention in one compiled kernel, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``."""
    if torch.compiler.is_compiling():
        # It becomes a part of the caller's compiled code.
        return attend(torch_flex.flex_attention, query, key, value, metadata, options)
    case = Case.of(query, key, value, options)
    compiled = _compiled(
        *(case.device, case.dtype, case.heads, case.kv_heads, case.head_dim, case.value_dim, case.needs_grad),
        *(options.softmax_scale, options.window, options.sinks is not None),
    )
    return attend(compiled, query, key, value, metadata, options)


def attend(
    flex: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """Run :func:`attention`, with its shapes ``[P, H, D]``, through torch's ``flex_attention``, compiled or not."""
    window = options.window
    mask = metadata.derived(f"flex window {window}", lambda metadata: build_mask(metadata, window))
    if query.device.type == "cpu":
        # It has no backward there and rejects tensors that require gradients even if none are needed.
        query, key, value = query.detach(), key.detach(), value.detach()
    heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    arguments: dict[str, Any] = {
        "block_mask": mask,
        "scale": options.softmax_scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if options.sinks is None:
        out = flex(*heads_first, **arguments)
    else:
        out, aux = flex(*heads_first, **arguments, return_aux=torch_flex.AuxRequest(lse=True))
        # A sink is one more score without a value: it takes its share of the weight away from all others.
        share = torch.sigmoid(aux.lse - options.sinks.to(aux.lse.dtype)[:, None])
        out = (out * share.unsqueeze(-1)).to(query.dtype)
    result: torch.Tensor = out.squeeze(0).transpose(0, 1)
    return result


def plan(metadata: TreeMetadata, case: Case) -> object:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    return _lists(metadata, case.options.window)


def check(case: Case) -> None:
    """Compare nothing: FlexAttention is torch's own."""


def build_mask(metadata: TreeMetadata, window: int | None) -> BlockMask:
    """The block mask of a micro-batch, on the device of its metadata."""
    lists: dict[str, Any] = {}
    for side, one in _lists(metadata, window).items():
        lists |= {f"{side}_num_blocks": one.counts, f"{side}_indices": one.square()}
    return BlockMask(
        seq_lengths=(metadata.padded_size, metadata.padded_size),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_visible(metadata, window),
        **lists,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rectangle:
    """Return the number of blocks that each of B blocks meets, int32 ``[1, 1, B]``, and these blocks, ``[B, most]``."""

    counts: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def of(cls, tiles: Tiles, full: bool, device: torch.device) -> _Rectangle:
        counts, blocks = tiles.padded(full=full)
        return cls(counts=upload(counts, device)[None, None], blocks=upload(blocks, device))

    def square(self) -> torch.Tensor:
        """int32 ``[1, 1, B, B]``, as FlexAttention wants it; zero-filled."""
        size, width = self.blocks.shape
        square = torch.zeros(1, 1, size, size, dtype=torch.int32, device=self.blocks.device)
        square[0, 0, :, :width] = self.blocks
        return square


def _lists(metadata: TreeMetadata, window: int | None) -> dict[str, _Rectangle]:
    """Return the lists by the names of ``BlockMask``'s arguments."""

    def build(metadata: TreeMetadata) -> dict[str, _Rectangle]:
        plan = block_plan(metadata, BLOCK, BLOCK, window=window)
        return {
            prefix + side: _Rectangle.of(tiles, bool(prefix), metadata.subtree_end.device)
            for side, tiles in (("kv", plan.by_query), ("q", plan.by_key))
            for prefix in ("", "full_")
        }

    return metadata.derived(f"flex lists, window {window}", build)


def _visible(metadata: TreeMetadata, window: int | None) -> Mod:
    subtree_end, position = metadata.subtree_end, metadata.tree_position_ids

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether a pair of indices ``[]`` is visible."""
        return (key <= query) & (query < subtree_end[key])

    if window is None:
        return visible
    reach: int = window

    def visible_in_window(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Return whether a pair of indices ``[]`` is visible and within the window."""
        return visible(batch, head, query, key) & (position[query] - position[key] < reach)

    return visible_in_window


def refusal(case: Case) -> str | None:
    """Return the property of a case that torch's FlexAttention does not support, or not on this device."""
    options = case.options
    if options.sinks is not None and not hasattr(torch_flex, "AuxRequest"):
        return "sinks (torch before 2.9 does not return the log-sum-exp)"
    if case.device.type == "cpu":
        if case.needs_grad:
            return "training with device=cpu (FlexAttention has no backward there)"
        if options.sinks is not None:
            return "sinks with device=cpu (FlexAttention returns no log-sum-exp there)"
        if options.window is not None:
            return f"window={options.window} with device=cpu (torch cannot compile it there)"
        if case.dtype == torch.float64:
            return "dtype=torch.float64"
        return None
    if case.dtype == torch.float64:
        return "dtype=torch.float64"
    if min(case.head_dim, case.value_dim) < 16:
        return f"head_dim={min(case.head_dim, case.value_dim)} (at least 16)"
    return None
