"""Tree attention through FlashAttention-4 (``flash-attn-4`` on PyPI): a mask over the interval, and our block lists.

Its block-sparse kernels visit the tiles that the lists name, full ones without a mask. The lists have to be made for
the sizes of its own tiles, which :func:`tiles_of` repeats from ``flash_attn/cute/interface.py`` (4.0.0b36); other sizes
are refused there, by an exception. It is compared with the reference before its first use, because its block-sparse
backward has been wrong without saying so (flash-attention issue 2623).

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from mcore_prefix_tree.attention.blocks import BlockPlan, Tiles, block_plan
from mcore_prefix_tree.attention.options import AttentionOptions, Case
from mcore_prefix_tree.attention.parity import check_parity
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.upload import upload

HOPPER, BLACKWELL = 9, 10

# Tiles reach past the last token, and so does what the mask reads of them: as far as the largest tile.
_PADDING = 256


class Block(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int


class TilePair(NamedTuple):
    """Tiles of the forward and of the backward."""

    forward: Block
    backward: Block


def tiles_of(capability: tuple[int, int], head_dim: int, value_dim: int) -> TilePair:
    """The tiles of its block-sparse kernels.

    Args:
        capability: of a Hopper or Blackwell GPU.
        head_dim: D.
        value_dim: W.
    """
    if capability[0] == BLACKWELL:
        # Two query tiles of 128 a block; from a head_dim of 192 on, two blocks share a backward tile of keys.
        return TilePair(Block(256, 128), Block(128, 256 if head_dim == 192 else 128))
    if head_dim <= 96:
        return TilePair(Block(192, 128), Block(128 if head_dim <= 64 else 64, 128))
    if head_dim <= 128:
        return TilePair(Block(128, 128), Block(64, 128))
    if head_dim <= 192:
        return TilePair(Block(128, 128 if value_dim <= 128 else 112), Block(64, 96))
    return TilePair(Block(128, 80), Block(64, 64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """What the kernels are told of the tree.

    Attributes:
        forward: for each block of queries its blocks of keys, as the package's ``BlockSparseTensorsTorch``.
        backward: for each block of keys its blocks of queries.
        tensors: int32, what the mask reads: the end of each token's subtree, and with a window its position.
    """

    forward: Any
    backward: Any
    tensors: list[torch.Tensor]


def build_mask(metadata: TreeMetadata, tiles: TilePair, window: int | None) -> Mask:
    """The mask of a micro-batch, on the device of its metadata."""

    def plan(block: Block) -> BlockPlan:
        return block_plan(metadata, block.queries, block.keys, window=window)

    device = metadata.subtree_end.device
    tensors = [metadata.subtree_end] if window is None else [metadata.subtree_end, metadata.tree_position_ids]
    return Mask(
        forward=_block_sparse(plan(tiles.forward).by_query, tiles.forward, device),
        backward=_block_sparse(plan(tiles.backward).by_key, tiles.backward, device),
        tensors=[torch.nn.functional.pad(tensor, (0, _PADDING)) for tensor in tensors],
    )


def _block_sparse(tiles: Tiles, block: Block, device: torch.device) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    masked, full = tiles.padded(full=False), tiles.padded(full=True)
    return BlockSparseTensorsTorch(
        *(upload(array, device)[None, None] for array in (*masked, *full)), block_size=tuple(block)
    )


@cache
def _visible(window: int | None) -> Any:
    """The mask in FlashAttention-4's own language; it is compiled into the kernel once for each window."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit  # type: ignore[untyped-decorator]
    def visible(batch: Any, head: Any, query: Any, key: Any, seqlen_info: Any, tensors: Any) -> Any:
        end = utils.scalar_to_ssa(tensors[0][key[0]], cutlass.Int32)
        return (key <= query) & (query < end)

    @cute.jit  # type: ignore[untyped-decorator]
    def visible_in_window(batch: Any, head: Any, query: Any, key: Any, seqlen_info: Any, tensors: Any) -> Any:
        end = utils.scalar_to_ssa(tensors[0][key[0]], cutlass.Int32)
        behind = utils.scalar_to_ssa(tensors[1][query[0]] - tensors[1][key[0]], cutlass.Int32)
        reach = utils.scalar_to_ssa(cutlass.Int32(window), cutlass.Int32)
        return (key <= query) & (query < end) & (behind < reach)

    return visible if window is None else visible_in_window


def arguments(mask: Mask, options: AttentionOptions) -> dict[str, Any]:
    """What its forward and its backward are given beside the tensors and the lists."""
    given: dict[str, Any] = {
        "softmax_scale": options.softmax_scale,
        "mask_mod": _visible(options.window),
        "aux_tensors": mask.tensors,
    }
    if options.logit_softcap is not None:
        given["softcap"] = options.logit_softcap
    if options.sinks is not None:
        given["learnable_sink"] = options.sinks
    return given


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention in one kernel, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``; checked on first use.

    Raises:
        ParityError: the kernel is wrong on this machine.
    """
    check_parity("fa4", attend, Case.of(query, key, value, options))
    return attend(query, key, value, metadata, options)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """:func:`attention`, unchecked."""
    from flash_attn.cute import flash_attn_func

    tiles = tiles_of(torch.cuda.get_device_capability(query.device), query.shape[2], value.shape[2])
    window = options.window
    mask = metadata.derived(
        f"fa4 {tiles.forward} {tiles.backward} window {window}",
        lambda metadata: build_mask(metadata, tiles, window),
    )
    out: torch.Tensor
    out, _ = flash_attn_func(
        query[None],
        key[None],
        value[None],
        block_sparse_tensors=mask.forward,
        block_sparse_tensors_bwd=mask.backward,
        **arguments(mask, options),
    )
    return out.squeeze(0)


@cache
def _is_installed() -> bool:
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    return True


def refusal(case: Case) -> str | None:
    """What its block-sparse kernels do not do, from the assertions in its source."""
    if case.capability is None:
        return f"device={case.device.type} (it is a CUDA kernel)"
    if not _is_installed():
        return "device=cuda without flash-attn-4, which pip install 'mcore-prefix-tree[fa4]' installs"
    if case.capability[0] not in (HOPPER, BLACKWELL):
        return f"a GPU of compute capability {case.capability[0]}.{case.capability[1]} (Hopper and Blackwell only)"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={case.dtype} (it takes bfloat16 and float16)"
    if case.needs_grad and case.options.deterministic:
        return "deterministic=True (its block-sparse backward adds dQ up in any order)"
    return _head_dim_refusal(case)


def _head_dim_refusal(case: Case) -> str | None:
    dims = (case.head_dim, case.value_dim)
    shown = f"head_dim={case.head_dim} with values of {case.value_dim}"
    if any(dim % 8 for dim in dims) or min(dims) < 8:
        return f"{shown} (multiples of 8)"
    if case.capability is not None and case.capability[0] == BLACKWELL:
        # With 256 it has a forward for block lists, but a backward without them.
        known = max(dims) <= 128 or dims == (192, 128)
        return None if known else f"{shown} (at most 128, or 192 with 128)"
    if max(dims) > 256:
        return f"{shown} (at most 256)"
    if case.needs_grad and case.heads != case.kv_heads and case.head_dim != case.value_dim:
        return f"{shown} and {case.heads} heads on {case.kv_heads} (its backward of grouped heads wants equal dims)"
    return None
