"""Launching the kernels on tensors.

Legend: P padded tokens, R P in full blocks, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mcore_prefix_tree.attention.triton_tree.backward import delta_kernel, key_value_kernel, query_kernel
from mcore_prefix_tree.attention.triton_tree.block_order import ROUND
from mcore_prefix_tree.attention.triton_tree.config import Configs, Launch, part, rounded
from mcore_prefix_tree.attention.triton_tree.forward import forward_kernel
from mcore_prefix_tree.utils.triton_here import launch_kernel

# Desired programs for each that a processor runs at a time, launched longest first. Every sample sees the keys of its
# prompt, so few programs have most of the work: with two for each, only the longest runs for half of the time.
_PROGRAMS_AT_A_TIME = 8
# The registers of a processor are enough for as many warps of these kernels.
_WARPS_AT_A_TIME = 8
_KV_HEADS_AT_ONCE = 8
# The most that the sums of divided groups may take, in bytes, of a call.
PARTIAL_BYTES = 256 << 20
# Of the kernel of row sums, on every chip. It has neither keys nor a pipeline.
ROW_SUMS = Launch(query_block=ROUND // 2, key_block=ROUND // 2, warps=8, stages=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """Arguments common to the kernels of one call; ``end`` and ``position``, int32 ``[R]``, as in ``DevicePlan``."""

    configs: Configs
    end: torch.Tensor
    position: torch.Tensor
    softmax_scale: float
    window: int | None

    @property
    def scale(self) -> float:
        """Factor that makes scores logits in units of log 2: ``exp2`` is one instruction."""
        return self.softmax_scale * log2(e)

    def tiles(self, tensor: torch.Tensor, rows: int, widest: int) -> Any:
        """``[P, H, D]`` as the kernels' ``load_rows`` takes it, in tiles of ``rows`` tokens of one head."""
        size, heads, width = tensor.shape
        # The stride of a dimension of one entry means nothing, but the copy engine wants a multiple of 16 bytes, and
        # Triton would compile another kernel for a stride that 16 divides if it does not divide the others'.
        stride = tensor.stride(0) if size > 1 else heads * width
        head_stride = tensor.stride(1) if heads > 1 else width
        if not self.configs.engine:
            return (tensor, head_stride, stride)
        return TensorDescriptor(tensor, [heads, size, width], [head_stride, stride, 1], [1, rows, part(width, widest)])

    def sums(self, tensor: torch.Tensor | None, rows: int, widest: int) -> Any:
        """Return fp32 sums ``[H, R, D in full parts]``, dense, as the kernels take them; None for None."""
        if tensor is None or not self.configs.engine:
            return tensor
        block = [1, rows, part(tensor.shape[2], widest)]
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """``[P, H, D]`` itself, or a copy if its rows are not 16-byte aligned vectors: broadcast or transposed, say."""
    strides = [stride for stride, size in zip(tensor.stride()[:2], tensor.shape[:2], strict=True) if size > 1]
    aligned = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in strides)
    if aligned and tensor.stride(2) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _constants(query: torch.Tensor, value: torch.Tensor, launch: Launch, call: Call) -> dict[str, Any]:
    """Return the compile-time constants for queries ``[P, H, D]`` and values ``[P, K, W]``."""
    head_dim, value_dim = query.shape[2], value.shape[2]
    return {
        "KV_HEADS_AT_ONCE": kv_heads_at_once(value.shape[1]),
        "GROUP": query.shape[1] // value.shape[1],
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HEAD_PART": part(head_dim, launch.widest),
        "VALUE_PART": part(value_dim, launch.widest),
        "BLOCK_M": launch.query_block,
        "BLOCK_N": launch.key_block,
        "STAGES": launch.stages,
        "ENGINE": call.configs.engine,
        "num_warps": launch.warps,
    }


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    schedule: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``[P, H, W]`` and fp32 log-sum-exps ``[H, R]`` in units of log 2, infinite past P."""
    launch = call.configs.forward
    size, heads, _ = query.shape
    out = query.new_empty((size, heads, value.shape[2]))
    # Infinity gives rows that do not exist no weight in backward.
    lse = torch.full((heads, len(call.end)), float("inf"), dtype=torch.float32, device=query.device)
    query_blocks = triton.cdiv(size, launch.query_block)
    launch_kernel(
        forward_kernel,
        query_blocks * heads,
        query,
        call.tiles(query, launch.query_block, launch.widest),
        call.tiles(key, launch.key_block, launch.widest),
        call.tiles(value, launch.key_block, launch.widest),
        call.tiles(out, launch.query_block, launch.widest),
        lse,
        None if sinks is None else sinks.contiguous(),
        call.end,
        call.position,
        schedule,
        size,
        query_blocks,
        len(call.end),
        call.scale,
        call.window,
        **_constants(query, value, launch, call),
    )
    return out, lse


def row_sums(out: torch.Tensor, grad_out: torch.Tensor, call: Call) -> torch.Tensor:
    """``sum(out * grad_out)`` of each row, fp32 ``[H, R]``, zero past P."""
    size, heads, width = out.shape
    rows = len(call.end)
    launch = ROW_SUMS
    delta = torch.empty((heads, rows), dtype=torch.float32, device=out.device)
    launch_kernel(
        delta_kernel,
        rows // launch.query_block * heads,
        out,
        call.tiles(out, launch.query_block, launch.widest),
        call.tiles(grad_out, launch.query_block, launch.widest),
        delta,
        size,
        rows,
        HEADS=heads,
        VALUE_DIM=width,
        VALUE_PART=part(width, launch.widest),
        BLOCK_M=launch.query_block,
        ENGINE=call.configs.engine,
        num_warps=launch.warps,
    )
    return delta


def key_value_grads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    schedule: torch.Tensor,
    call: Call,
    made: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dK ``[P, K, D]`` and dV ``[P, K, W]``, or those that ``made`` names if they are computed separately."""
    launch = call.configs.key_value
    size, heads, _ = query.shape
    kv_heads = key.shape[1]
    key_blocks = triton.cdiv(size, launch.key_block)
    splits = 1
    if call.configs.divides:
        splits = splits_for(
            key_blocks * kv_heads,
            heads // kv_heads,
            processors=processors(query.device),
            warps=launch.warps,
            bytes_undivided=4
            * len(call.end)
            * kv_heads
            * sum(rounded(like.shape[2], launch.widest) for like in (key, value)),
        )
    grads = [like.new_empty((size, kv_heads, like.shape[2])) for like in (key, value)]
    partials = [_partial_sums(grad, splits, call) if heads > kv_heads else None for grad in grads]
    tiles = [call.tiles(grad, launch.key_block, launch.widest) for grad in grads]
    tiles += [call.sums(partial, launch.key_block, launch.widest) for partial in partials]
    of_key, of_value = [tiles[0], None, tiles[2], None], [None, tiles[1], None, tiles[3]]
    apart = [one for one, wanted in zip((of_key, of_value), made, strict=True) if wanted]
    for written in apart if call.configs.apart else (tiles,):
        launch_kernel(
            key_value_kernel,
            key_blocks * kv_heads * splits,
            query,
            call.tiles(query, launch.query_block, launch.widest),
            call.tiles(key, launch.key_block, launch.widest),
            call.tiles(value, launch.key_block, launch.widest),
            call.tiles(grad_out, launch.query_block, launch.widest),
            *written,
            lse,
            delta,
            call.end,
            call.position,
            schedule,
            size,
            key_blocks,
            len(call.end),
            splits,
            call.softmax_scale,
            call.scale,
            call.window,
            LISTED=call.window is not None,
            **_constants(query, value, launch, call),
        )
    if splits > 1:
        for grad, partial in itertools.compress(zip(grads, partials, strict=True), made):
            assert partial is not None
            total = partial.unflatten(0, (kv_heads, splits)).sum(1)
            grad.copy_(total[:, :size, : grad.shape[2]].transpose(0, 1))
    return grads[0], grads[1]


def _partial_sums(grad: torch.Tensor, splits: int, call: Call) -> torch.Tensor:
    """Return fp32 ``[K * splits, R, D in full parts]`` for splits of ``grad`` ``[P, K, D]``; one row without them."""
    _, kv_heads, width = grad.shape
    shape = (kv_heads * splits, len(call.end) if splits > 1 else 1, rounded(width, call.configs.key_value.widest))
    return torch.empty(shape, dtype=torch.float32, device=grad.device)


def query_grads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    schedule: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """dQ ``[P, H, D]``."""
    launch = call.configs.query
    size, heads, width = query.shape
    grad_query = query.new_empty((size, heads, width))
    query_blocks = triton.cdiv(size, launch.query_block)
    launch_kernel(
        query_kernel,
        query_blocks * heads,
        query,
        call.tiles(query, launch.query_block, launch.widest),
        call.tiles(key, launch.key_block, launch.widest),
        call.tiles(value, launch.key_block, launch.widest),
        call.tiles(grad_out, launch.query_block, launch.widest),
        call.tiles(grad_query, launch.query_block, launch.widest),
        lse,
        delta,
        call.end,
        call.position,
        schedule,
        size,
        query_blocks,
        len(call.end),
        call.softmax_scale,
        call.scale,
        call.window,
        **_constants(query, value, launch, call),
    )
    return grad_query


def kv_heads_at_once(kv_heads: int) -> int:
    """Return the number of key/value heads whose blocks run side by side, a divisor of all.

    Up to eight keep the heads of a grouped model together. With all of 128 ungrouped heads at once, no two programs
    that run together read the same keys, and an H100's memory would limit them.
    """
    return max(divisor for divisor in range(1, _KV_HEADS_AT_ONCE + 1) if kv_heads % divisor == 0)


def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_for(programs: int, group: int, *, processors: int, warps: int, bytes_undivided: int) -> int:
    """Return the number of programs that share a group's query heads, so that few key heads still fill the device.

    It depends on the padded size and the machine, not on the tree. ``programs`` are those of undivided groups, and all
    splits' fp32 sums of dK and dV, ``bytes_undivided`` each, take at most :data:`PARTIAL_BYTES`.
    """
    wanted = _PROGRAMS_AT_A_TIME * processors * max(1, _WARPS_AT_A_TIME // warps)
    splits = 1
    for larger in range(2, group + 1):
        if programs * splits >= wanted or larger * bytes_undivided > PARTIAL_BYTES:
            break
        if group % larger == 0:
            splits = larger
    return splits
