"""Prefix-tree training on stock Megatron-Core: every shared token computed once, every gradient unchanged."""

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.sample import Sample, SampleError

__all__ = ["FlatLayout", "Sample", "SampleError", "TreeMetadata", "fold"]
