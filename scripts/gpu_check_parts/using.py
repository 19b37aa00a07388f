"""Calls of attention on a GPU; packages and files of this repository that affect the figures of a method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from attention_bench.settings import Settings

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.attention.api import load_backend

if TYPE_CHECKING:
    from mcore_prefix_tree.attention.parity import Attention

_ATTENTION = "mcore_prefix_tree/attention"
_FA4 = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


def gpu_case(dims: tuple[int, int, int, int], dtype: torch.dtype, **options: Any) -> Case:
    """Return a case with gradients on the GPU, and the options of attention other than the scale."""
    shape = dict(zip(("heads", "kv_heads", "head_dim", "value_dim"), dims, strict=True))
    device = f"cuda:{torch.cuda.current_device()}"
    case = Settings(**shape, dtype=str(dtype).removeprefix("torch."), device=device, repeats=1).case
    return replace(case, options=replace(case.options, **options))


def unchecked(backend: str) -> Attention:
    """Return the attention of a back-end without its self-check on first use."""
    module: Any = load_backend(backend)
    found: Attention = module.attend_as_tabled if backend == "triton" else module.attend
    return found


def packages_of(method: str) -> tuple[str, ...]:
    """Return the packages whose version can change a figure of an attention method."""
    own = {"fa4": (*_FA4, "triton"), "FlashAttention-4": _FA4}
    own |= dict.fromkeys(("triton", "flex"), ("torch", "triton"))
    return own.get(method.removesuffix(", whole groups"), ("torch",))


def sources_of(method: str) -> tuple[str, ...]:
    """Return the files and folders of the repository that implement an attention method."""
    own = {
        "triton": (f"{_ATTENTION}/triton_tree", f"{_ATTENTION}/tile_blocks.py"),
        "fa4": (f"{_ATTENTION}/fa4.py", f"{_ATTENTION}/triton_tree", f"{_ATTENTION}/tile_blocks.py"),
        "flex": (f"{_ATTENTION}/flex.py", f"{_ATTENTION}/tile_blocks.py"),
    }
    return own.get(method.removesuffix(", whole groups"), ())
