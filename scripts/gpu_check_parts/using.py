"""Calls of attention on a GPU; packages and files of this repository that affect the figures of a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.api import load_backend

if TYPE_CHECKING:
    from mcore_prefix_tree.attention.parity import Attention

_ATTENTION = "mcore_prefix_tree/attention"
_FA4 = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


def gpu_case(dims: tuple[int, int, int, int], dtype: torch.dtype, **options: Any) -> Case:
    """Return a case with gradients on the current GPU.

    Args:
        dims: query heads, key heads, dims of queries and keys, dims of values.
        dtype: dtype of queries, keys and values.
        options: fields of :class:`AttentionOptions` other than the scale.
    """
    heads, kv_heads, head_dim, value_dim = dims
    return Case(
        device=torch.device("cuda", torch.cuda.current_device()),
        capability=torch.cuda.get_device_capability(),
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        needs_grad=True,
        options=AttentionOptions(softmax_scale=head_dim**-0.5, **options),
    )


def unchecked(backend: str) -> Attention:
    """Return the attention of a back-end without its self-check on first use."""
    module: Any = load_backend(backend)
    found: Attention = module.attend_as_tabled if backend == "triton" else module.attend
    return found


def packages_of(method: str) -> tuple[str, ...]:
    """Return the packages whose version can change a figure of an attention method."""
    if method in ("fa4", "fa4, whole groups"):
        return (*_FA4, "triton")
    if method == "FlashAttention-4":
        return _FA4
    if method in ("triton", "triton, whole groups", "flex"):
        return ("torch", "triton")
    return ("torch",)


def sources_of(method: str) -> tuple[str, ...]:
    """Return the files and folders of the repository that implement an attention method."""
    own = {
        "triton": (f"{_ATTENTION}/triton_tree", f"{_ATTENTION}/tile_blocks.py"),
        "fa4": (f"{_ATTENTION}/fa4.py", f"{_ATTENTION}/triton_tree", f"{_ATTENTION}/tile_blocks.py"),
        "flex": (f"{_ATTENTION}/flex.py", f"{_ATTENTION}/tile_blocks.py"),
    }
    return own.get(method.removesuffix(", whole groups"), ())
