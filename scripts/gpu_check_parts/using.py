"""Packages and files of this repository that the figures of a method depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcore_prefix_tree.attention.api import load_backend

if TYPE_CHECKING:
    from mcore_prefix_tree.attention.parity import Attention

_ATTENTION = "mcore_prefix_tree/attention"
_FA4 = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


def unchecked(backend: str) -> Attention:
    """Return the attention of a back-end without the check that it makes of itself on first use."""
    module: Any = load_backend(backend)
    found: Attention = module.attend_as_tabled if backend == "triton" else module.attend
    return found


def packages_of(method: str) -> tuple[str, ...]:
    """Return the packages whose version can move a figure of a way to attend."""
    if method in ("fa4", "FlashAttention-4"):
        return _FA4
    if method in ("triton", "triton, whole groups", "flex"):
        return ("torch", "triton")
    # FlashAttention 2 and 3, TransformerEngine and the peers, where they are installed.
    return ("torch", "flash-attn", "flash-attn-3", "transformer-engine", "prefix-grouper", "areal")


def sources_of(method: str) -> tuple[str, ...]:
    """Return the files and folders of the repository that a way to attend consists of."""
    own = {
        "triton": (f"{_ATTENTION}/triton_tree", f"{_ATTENTION}/blocks.py"),
        "fa4": (f"{_ATTENTION}/fa4.py", f"{_ATTENTION}/blocks.py"),
        "flex": (f"{_ATTENTION}/flex.py", f"{_ATTENTION}/blocks.py"),
    }
    own["triton, whole groups"] = own["triton"]
    return own.get(method, (f"{_ATTENTION}/cascade",) if method.startswith("cascade") else ())
