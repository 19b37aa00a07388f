"""A trie laid out flat: what the model reads, and the way back to the samples."""

from mcore_prefix_tree.layout.flat import FlatLayout, fold

__all__ = ["FlatLayout", "fold"]
