"""What a figure of a method depends on: packages, and files of this repository."""

from __future__ import annotations

_ATTENTION = "mcore_prefix_tree/attention"
_FA4 = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


def packages_of(method: str) -> tuple[str, ...]:
    """Return the packages whose version can move a figure of a way to attend."""
    if method in ("fa4", "FlashAttention-4"):
        return _FA4
    if method in ("triton", "flex"):
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
    return own.get(method, (f"{_ATTENTION}/cascade",) if method.startswith("cascade") else ())
