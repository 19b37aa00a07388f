"""Tree attention in our own Triton kernels for NVIDIA GPUs; the first call imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.parity import check_parity
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.triton_here import has_triton, interprets

if TYPE_CHECKING:
    from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan
    from mcore_prefix_tree.attention.triton_tree.config import Configs

MAX_HEAD_DIM = 256


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention, ``[P, H, D], [P, K, D], [P, K, W] -> [P, H, W]``, in Triton kernels.

    Saves query, key, value, out and one number per row for backward, which gives the same bits twice. The block lists
    are made once per micro-batch. On a GPU, 16-bit kernels are compared with the reference on first use, and wrong ones
    raise ParityError: another version of the compiler may have produced untested code for this chip.
    """
    check(Case.of(query, key, value, options))
    return attend_as_tabled(query, key, value, metadata, options)


def check(case: Case) -> None:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    if case.capability is not None and case.dtype in _CHECKED:
        check_parity("triton", attend_as_tabled, case)
        if case.needs_grad and case.heads > case.kv_heads:
            # The comparison's forest is so small that groups are divided; a longer one does not divide them.
            check_parity("triton", _attend_whole_groups, case)


def plan(metadata: TreeMetadata, case: Case) -> DevicePlan:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    from mcore_prefix_tree.attention.triton_tree.config import configs_for

    return _plan(metadata, configs_for(case), case.options.window)


def _plan(metadata: TreeMetadata, configs: Configs, window: int | None) -> DevicePlan:
    from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan

    return metadata.derived(
        f"triton {configs.packed} window {window}", lambda metadata: DevicePlan.of(metadata, configs, window)
    )


# The comparison's limits are those of 16-bit rounding.
_CHECKED = (torch.bfloat16, torch.float16)


def attend_as_tabled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
    *,
    divides: bool = True,
    operator: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Run :func:`attention`, ``[P, H, D]``, unchecked, with the table's launch or with undivided groups of heads.

    ``operator`` replaces ``ops.tree_attention``; it has the same arguments, results and backward.
    """
    from mcore_prefix_tree.attention.triton_tree.config import configs_for

    configs = configs_for(Case.of(query, key, value, options))
    configs = configs if divides else replace(configs, divides=False)
    return attend(query, key, value, metadata, options, configs, operator)


_attend_whole_groups = partial(attend_as_tabled, divides=False)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
    configs: Configs,
    operator: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Run :func:`attention`, ``[P, H, D]``, unchecked, with the launches in ``configs``."""
    from mcore_prefix_tree.attention.triton_tree.ops import tree_attention

    plan = _plan(metadata, configs, options.window)
    out: torch.Tensor = (operator or tree_attention)(
        query,
        key,
        value,
        options.sinks,
        plan.end,
        plan.position,
        plan.schedules,
        configs.packed,
        options.softmax_scale,
        options.window,
    )[0]
    return out


def refusal(case: Case) -> str | None:
    """Return the unsupported property of a case: the device, the dtype or the head dimensions."""
    reason = _machine_refusal(case)
    if reason is not None:
        return reason
    for name, width in (("head_dim", case.head_dim), ("value head_dim", case.value_dim)):
        if width % 8 or width > MAX_HEAD_DIM:
            return f"{name}={width} (it takes multiples of 8 up to {MAX_HEAD_DIM})"
    if not case.options.softmax_scale > 0:
        return f"softmax_scale={case.options.softmax_scale} (it takes positive ones)"
    return None


def _machine_refusal(case: Case) -> str | None:
    if not has_triton():
        return f"device {case.device} (it needs the package triton, 3.4 or newer)"
    dtypes = [torch.float32, torch.float16]  # all that the interpreter has
    if case.device.type == "cpu":
        if not interprets():
            return "device cpu (its kernels are compiled for NVIDIA GPUs)"
    elif case.capability is None or torch.version.hip is not None:
        return f"device {case.device} (its kernels are compiled for NVIDIA GPUs)"
    elif case.capability < (8, 0):
        return f"compute capability {case.capability[0]}.{case.capability[1]} (it needs 8.0 or newer)"
    else:
        dtypes.append(torch.bfloat16)
    return None if case.dtype in dtypes else f"dtype {case.dtype} (it takes {', '.join(map(str, dtypes))})"
