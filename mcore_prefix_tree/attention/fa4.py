"""Tree attention through FlashAttention-4 (``flash-attn-4`` on PyPI): a mask over the interval, and our block lists.

Its block-sparse kernels visit the tiles that the lists name, full ones without a mask. The lists have to be made for
the sizes of its tiles, which :func:`choose_tiles` repeats from ``flash_attn/cute/interface.py`` (4.0.0b36); that file
rejects other sizes by an exception. It is compared with the reference before its first use, because its block-sparse
backward has been silently wrong (flash-attention issue 2623).

On Hopper its block-sparse backward adds dQ up in any order. On Blackwell it takes the order as a list. Where it has no
backward for a case, deterministic or at all, that of ``triton_tree`` reads its output and log-sum-exps.

Legend: P padded tokens, R P in full blocks, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import e, inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mcore_prefix_tree.attention import triton_tree
from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.parity import check_parity, check_size
from mcore_prefix_tree.attention.tile_blocks import BlockPlan, Int32Array, block_plan
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.utils.versions import install_command

if TYPE_CHECKING:
    from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan

HOPPER, BLACKWELL = 9, 10
_BLACKWELL_QUERIES = 256

# Tiles reach past the last token, and so do the mask's reads: as far as the largest tile.
_PADDING = 256
# Keys that the mask of a Blackwell forward is evaluated for at a time.
_WORD = 32


class Block(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int


class TilePair(NamedTuple):
    """Tiles of the forward, and of the backward if it is the package's."""

    forward: Block
    backward: Block | None


def choose_tiles(capability: tuple[int, int], head_dim: int, value_dim: int) -> TilePair:
    """Return the tiles of its block-sparse kernels on a Hopper or Blackwell GPU."""
    if capability[0] == BLACKWELL:
        # Two query tiles of 128 a block; from a head_dim of 192 on, two blocks share a backward tile of keys.
        return TilePair(Block(_BLACKWELL_QUERIES, 128), Block(128, 256 if head_dim == 192 else 128))
    if head_dim <= 96:
        return TilePair(Block(192, 128), Block(128 if head_dim <= 64 else 64, 128))
    if head_dim <= 128:
        return TilePair(Block(128, 128), Block(64, 128))
    if head_dim <= 192:
        return TilePair(Block(128, 128 if value_dim <= 128 else 112), Block(64, 96))
    return TilePair(Block(128, 80), Block(64, 64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """Tensors of the tree that the kernels read."""

    forward: Any  # blocks of keys for each block of queries, as the package's BlockSparseTensorsTorch
    backward: Any  # blocks of queries for each block of keys; None if the backward is that of triton_tree
    # int32 tensors that the mask reads: the end of each token's subtree, and with a window its position.
    tensors: tuple[torch.Tensor, ...]
    ordered: bool  # whether the backward adds dQ up in the order that its lists give


def build_mask(metadata: TreeMetadata, tiles: TilePair, window: int | None, *, ordered: bool = False) -> Mask:
    """Return the mask of a micro-batch, on the device of its metadata."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    device = metadata.subtree_end.device

    def plan(block: Block) -> BlockPlan:
        return block_plan(metadata, block.queries, block.keys, window=window)

    def uploaded(*arrays: Int32Array) -> list[torch.Tensor]:
        return [upload(array, device)[None, None] for array in arrays]

    by_query, backward = plan(tiles.forward).by_query, None
    if tiles.backward is not None:
        lists = [plan(tiles.backward).by_key.padded(full=full) for full in (False, True)]
        order: dict[str, Any] = {}
        if ordered:
            masked, full = uploaded(*write_order(lists))
            order = {"dq_write_order": masked, "dq_write_order_full": full, "spt": False}
        backward = BlockSparseTensorsTorch(*uploaded(*lists[0], *lists[1]), block_size=tuple(tiles.backward), **order)
    tensors = [metadata.subtree_end] if window is None else [metadata.subtree_end, metadata.tree_position_ids]
    return Mask(
        forward=BlockSparseTensorsTorch(
            *uploaded(*by_query.padded(full=False), *by_query.padded(full=True)), block_size=tuple(tiles.forward)
        ),
        backward=backward,
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
def _visible(window: int | None, *, words: bool = False) -> Any:
    """The mask in FlashAttention-4's own language; it is compiled into the kernel once for each window."""
    # With words, a forward evaluates it for 32 keys at a time, and it returns a bit for each, the lowest for the
    # first; a backward still does for one key.
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

    of_one = visible if window is None else visible_in_window

    @cute.jit  # type: ignore[untyped-decorator]
    def read(tensor: Any, first: Any) -> Any:
        return cute.make_tensor(tensor.iterator + first, _WORD).load()

    @cute.jit  # type: ignore[untyped-decorator]
    def visible_word(batch: Any, head: Any, query: Any, key: Any, seqlen_info: Any, tensors: Any) -> Any:
        if cutlass.const_expr(cute.size(key.shape) == 1):
            return of_one(batch, head, query, key, seqlen_info, tensors)
        # Past the last key, where the kernel masks them itself, it counts keys from zero again.
        first = cute.assume(key[0] // _WORD * _WORD, divby=_WORD)
        row, end, word = query[0], read(tensors[0], first), cutlass.Uint32(0)
        if cutlass.const_expr(window is not None):
            nearest, position = tensors[1][row] - window, read(tensors[1], first)
        for bit in cutlass.range_constexpr(_WORD):
            seen = row < end[bit]
            if cutlass.const_expr(window is not None):
                seen = seen & (nearest < position[bit])
            word = word | (cutlass.Uint32(seen) << bit)
        causal = utils.shr_u32(cutlass.Uint32(0xFFFFFFFF), cutlass.Uint32(cutlass.max(first + _WORD - 1 - row, 0)))
        return utils.scalar_to_ssa(word & causal, cutlass.Uint32)

    if not words:
        return of_one
    visible_word.__vec_size__ = _WORD
    return visible_word


def arguments(mask: Mask, options: AttentionOptions) -> dict[str, Any]:
    """Return the arguments of its forward and backward in addition to the tensors and the lists."""
    words = mask.forward.block_size[0] == _BLACKWELL_QUERIES
    if words:
        for tensor in mask.tensors:
            # The package's names: without them, it reads one number at a time.
            vars(tensor).update(__assumed_align__=16, __leading_dim__=0)
    given: dict[str, Any] = {
        "softmax_scale": options.softmax_scale,
        "mask_mod": _visible(options.window, words=words),
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
    if _borrows_backward(case) and case.heads > case.kv_heads:
        check_parity("fa4", _attend_whole_groups, case)  # as triton_tree.check


def plan(metadata: TreeMetadata, case: Case) -> tuple[Mask, DevicePlan | None]:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    return _mask(metadata, case), triton_tree.plan(metadata, case) if _borrows_backward(case) else None


def _mask(metadata: TreeMetadata, case: Case) -> Mask:
    assert case.capability is not None, "refused before"
    tiles, window = choose_tiles(case.capability, case.head_dim, case.value_dim), case.options.window
    if not _has_backward(case):
        tiles = tiles._replace(backward=None)
    ordered = case.options.deterministic and tiles.backward is not None
    return metadata.derived(
        f"fa4 {tiles.forward} {tiles.backward} window {window} ordered {ordered}",
        lambda metadata: build_mask(metadata, tiles, window, ordered=ordered),
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
    *,
    divides: bool = True,
) -> torch.Tensor:
    """Run :func:`attention`, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``, unchecked.

    ``divides`` is as in ``triton_tree.attend_as_tabled``, if that has the backward.
    """
    check_size("flash-attn-4", query)
    case = replace(Case.of(query, key, value, options), capability=torch.cuda.get_device_capability(query.device))
    mask = _mask(metadata, case)
    if not _borrows_backward(case):
        return run_kernels(query, key, value, mask, options)[0]
    tensors, unread = [*mask.forward[:4], *mask.tensors], min(metadata.unread, len(query))

    def operator(*given: Any) -> Any:
        *rows, schedules, configs, softmax_scale, window = given
        return fa4_forward(*rows, [*schedules, *tensors], configs, softmax_scale, window, unread)

    return triton_tree.attend_as_tabled(query, key, value, metadata, options, divides=divides, operator=operator)


_attend_whole_groups = partial(attend, divides=False)


def run_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    options: AttentionOptions,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out ``[P, H, W]`` of ``[P, H, D], [P, K, D], [P, K, W]``, and fp32 ``[H, P]`` log-sum-exps in nats."""
    from flash_attn.cute import flash_attn_func

    # It launches in the stream of the current device; backward has the right one from autograd.
    with torch.cuda.device_of(query):
        out, lse = flash_attn_func(
            query[None],
            key[None],
            value[None],
            block_sparse_tensors=mask.forward,
            block_sparse_tensors_bwd=mask.backward,
            deterministic=mask.ordered,
            return_lse=return_lse,
            **arguments(mask, options),
        )
    return out.squeeze(0), lse.squeeze(0) if return_lse else None


@torch.library.custom_op("mcore_prefix_tree::fa4_forward", mutates_args=())
def fa4_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    end: torch.Tensor,
    position: torch.Tensor,
    schedules: Sequence[torch.Tensor],
    configs: Sequence[int],
    softmax_scale: float,
    window: int | None,
    unread: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and log-sum-exps as ``triton_tree.ops.tree_attention``, whose backward reads them.

    Arguments are those of that operator; behind its schedules are four lists and the tensors of a :class:`Mask`.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    tiles = choose_tiles(torch.cuda.get_device_capability(query.device), query.shape[2], value.shape[2])
    lists = BlockSparseTensorsTorch(*schedules[3:7], block_size=tuple(tiles.forward))
    mask = Mask(forward=lists, backward=None, tensors=tuple(schedules[7:]), ordered=False)
    options = AttentionOptions(softmax_scale=softmax_scale, window=window, sinks=sinks)
    out, lse = run_kernels(query, key, value, mask, options, return_lse=True)
    assert lse is not None
    # Rows that nobody reads may have met no key; those and rows past P have no weight in backward.
    some = lse[:, unread:] * log2(e)
    return out, torch.nn.functional.pad(some, (unread, len(end) - len(query)), value=inf)


@fa4_forward.register_fake
def _(query: Any, key: Any, value: Any, sinks: Any, end: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty((query.shape[1], end.shape[0]), dtype=torch.float32)
    return query.new_empty((*query.shape[:2], value.shape[2])), lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    from mcore_prefix_tree.attention.triton_tree import ops

    ops.save(ctx, inputs, output)


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    from mcore_prefix_tree.attention.triton_tree import ops

    return ops.differentiate(ctx, grad_out, None)


fa4_forward.register_autograd(_differentiate, setup_context=_save)


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
    return _head_dim_refusal(case) or _backward_refusal(case) or _import_refusal()


def _has_backward(case: Case) -> bool:
    """Return whether the package differentiates a case that is not refused, from its assertions."""
    assert case.capability is not None, "refused before"
    if case.capability[0] == BLACKWELL:
        return case.head_dim <= 192
    # On Hopper, dQ is added up in any order, and the sums of grouped heads have one width.
    return not case.options.deterministic and (case.heads == case.kv_heads or case.head_dim == case.value_dim)


def _borrows_backward(case: Case) -> bool:
    return case.needs_grad and not _has_backward(case)


def _backward_refusal(case: Case) -> str | None:
    reason = triton_tree.refusal(case) if _borrows_backward(case) else None
    if reason is None:
        return None
    shown = f"deterministic={case.options.deterministic}, head_dim={case.head_dim} with values of {case.value_dim}"
    return f"{shown}: its backward there is that of 'triton', which does not support {reason}"


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
        known = max(dims) <= 128 or dims in ((192, 128), (256, 256))
        return None if known else f"{shown} (at most 128, or 192 with 128, or 256)"
    return f"{shown} (at most 256)" if max(dims) > 256 else None


# By module, asked once. torch.compile can follow a look-up here, but not an import.
_FAULTS: dict[str, str | None] = {}


def import_fault(module: str) -> str | None:
    """Return why a module, even of an installed package, cannot be imported, in one line; None if it can."""
    if module not in _FAULTS:
        _FAULTS[module] = None
        try:
            import_module(module)
        except Exception as error:  # from a shared library or other code that runs on import
            _FAULTS[module] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return _FAULTS[module]
