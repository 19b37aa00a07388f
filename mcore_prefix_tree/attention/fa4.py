"""Tree attention through FlashAttention-4 (``flash-attn-4`` on PyPI): a mask over the interval, and our block lists.

Its block-sparse kernels visit the tiles that the lists name, full ones without a mask. The lists have to be made for
the sizes of its tiles, which :func:`choose_tiles` repeats from ``flash_attn/cute/interface.py`` (4.0.0b36); that file
rejects other sizes by an exception. It is compared with the reference before its first use, because its block-sparse
backward has been silently wrong (flash-attention issue 2623).

On Hopper its block-sparse backward adds dQ up in any order. On Blackwell it takes the order as a list.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.imports import import_fault
from mcore_prefix_tree.attention.parity import check_parity, check_size
from mcore_prefix_tree.attention.tile_blocks import BlockPlan, Int32Array, block_plan
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.utils.versions import install_command

HOPPER, BLACKWELL = 9, 10

# Tiles reach past the last token, and so do the mask's reads: as far as the largest tile.
_PADDING = 256


class Block(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int


class TilePair(NamedTuple):
    """Tiles of the forward and of the backward."""

    forward: Block
    backward: Block


def choose_tiles(capability: tuple[int, int], head_dim: int, value_dim: int) -> TilePair:
    """Return the tiles of its block-sparse kernels on a Hopper or Blackwell GPU."""
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
    """Tensors of the tree that the kernels read.

    Attributes:
        forward: blocks of keys for each block of queries, as the package's ``BlockSparseTensorsTorch``.
        backward: blocks of queries for each block of keys.
        tensors: int32 tensors that the mask reads: the end of each token's subtree, and with a window its position.
        ordered: whether the backward adds dQ up in the order that its lists give.
    """

    forward: Any
    backward: Any
    tensors: tuple[torch.Tensor, ...]
    ordered: bool


def build_mask(metadata: TreeMetadata, tiles: TilePair, window: int | None, *, ordered: bool = False) -> Mask:
    """Return the mask of a micro-batch, on the device of its metadata."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    device = metadata.subtree_end.device

    def plan(block: Block) -> BlockPlan:
        return block_plan(metadata, block.queries, block.keys, window=window)

    def uploaded(*arrays: Int32Array) -> list[torch.Tensor]:
        return [upload(array, device)[None, None] for array in arrays]

    by_query, by_key = plan(tiles.forward).by_query, plan(tiles.backward).by_key
    lists = [by_key.padded(full=full) for full in (False, True)]
    order: dict[str, Any] = {}
    if ordered:
        masked, full = uploaded(*write_order(lists))
        order = {"dq_write_order": masked, "dq_write_order_full": full, "spt": False}
    tensors = [metadata.subtree_end] if window is None else [metadata.subtree_end, metadata.tree_position_ids]
    return Mask(
        forward=BlockSparseTensorsTorch(
            *uploaded(*by_query.padded(full=False), *by_query.padded(full=True)), block_size=tuple(tiles.forward)
        ),
        backward=BlockSparseTensorsTorch(*uploaded(*lists[0], *lists[1]), block_size=tuple(tiles.backward), **order),
        tensors=tuple(torch.nn.functional.pad(tensor, (0, _PADDING)) for tensor in tensors),
        ordered=ordered,
    )


def write_order(lists: Sequence[tuple[Int32Array, Int32Array]]) -> list[Int32Array]:
    """Return for each entry of the lists its key block's rank among all key blocks that its query block meets.

    A key block adds its share of dQ after those of lower rank. ``lists`` has counts ``[n]`` and query blocks ``[n,
    most]`` of the n key blocks; each block is in one of the lists.
    """
    entries = [np.arange(blocks.shape[1]) < counts[:, None] for counts, blocks in lists]
    key = np.concatenate([np.nonzero(one)[0] for one in entries])
    query = np.concatenate([blocks[one] for (_, blocks), one in zip(lists, entries, strict=True)])
    order = np.lexsort((key, query))
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order)) - np.searchsorted(query[order], query[order])
    ranks: list[Int32Array] = []
    for one, own in zip(entries, np.split(rank, [int(entries[0].sum())]), strict=True):
        ranks.append(np.zeros(one.shape, dtype=np.int32))
        ranks[-1][one] = own
    return ranks


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
    """Return the arguments of its forward and backward in addition to the tensors and the lists."""
    given: dict[str, Any] = {
        "softmax_scale": options.softmax_scale,
        "mask_mod": _visible(options.window),
        "aux_tensors": list(mask.tensors),
    }
    if options.sinks is not None:
        given["learnable_sink"] = options.sinks
    return given


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``; raises ParityError if its check fails."""
    check(Case.of(query, key, value, options))
    return attend(query, key, value, metadata, options)


def check(case: Case) -> None:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    check_parity("fa4", attend, case)


def plan(metadata: TreeMetadata, case: Case) -> Mask:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    assert case.capability is not None, "refused before"
    return _mask(metadata, case.capability, case.head_dim, case.value_dim, case.options)


def _mask(
    metadata: TreeMetadata, capability: tuple[int, int], head_dim: int, value_dim: int, options: AttentionOptions
) -> Mask:
    tiles, window = choose_tiles(capability, head_dim, value_dim), options.window
    ordered = options.deterministic and capability[0] == BLACKWELL
    return metadata.derived(
        f"fa4 {tiles.forward} {tiles.backward} window {window} ordered {ordered}",
        lambda metadata: build_mask(metadata, tiles, window, ordered=ordered),
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Run :func:`attention` unchecked, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``."""
    from flash_attn.cute import flash_attn_func

    capability = torch.cuda.get_device_capability(query.device)
    mask = _mask(metadata, capability, query.shape[2], value.shape[2], options)
    check_size("flash-attn-4", query)
    out: torch.Tensor
    # It launches in the stream of the current device; backward has the right one from autograd.
    with torch.cuda.device_of(query):
        out, _ = flash_attn_func(
            query[None],
            key[None],
            value[None],
            block_sparse_tensors=mask.forward,
            block_sparse_tensors_bwd=mask.backward,
            deterministic=mask.ordered,
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
    """Return the unsupported property of a case, from the assertions in the source of the block-sparse kernels."""
    if case.capability is None:
        return f"device={case.device.type} (it is a CUDA kernel)"
    if not _is_installed():
        return f"device=cuda without flash-attn-4, which {install_command('gpu')} installs"
    if case.capability[0] not in (HOPPER, BLACKWELL):
        return f"a GPU of compute capability {case.capability[0]}.{case.capability[1]} (Hopper and Blackwell only)"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={case.dtype} (it takes bfloat16 and float16)"
    if case.needs_grad and case.options.deterministic and case.capability[0] == HOPPER:
        return "deterministic=True (on Hopper its block-sparse backward adds dQ up in any order)"
    return _head_dim_refusal(case) or _import_refusal()


def _import_refusal() -> str | None:
    """Refuse a package that is there but cannot be used; asked last, because its import takes seconds."""
    fault = import_fault("flash_attn.cute")
    if fault is None:
        return None
    return (
        f"device=cuda with a flash-attn-4 that does not import ({fault}): install it into this Python's environment, "
        "since in a folder on PYTHONPATH the .pth files of its libraries are not read"
    )


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
