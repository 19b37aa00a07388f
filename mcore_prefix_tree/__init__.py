"""Prefix-tree training on stock Megatron-Core: every shared token computed once, every gradient unchanged."""

from typing import TYPE_CHECKING, Any

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.sample import Sample, SampleError, Signals

if TYPE_CHECKING:
    from mcore_prefix_tree.metadata import TreeMetadata

__all__ = ["FlatLayout", "Sample", "SampleError", "Signals", "TreeMetadata", "fold"]


def __getattr__(name: str) -> Any:
    # It needs torch, which takes seconds to import; data, folding and the command line's --help do not.
    if name == "TreeMetadata":
        from mcore_prefix_tree.metadata import TreeMetadata

        return TreeMetadata
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
