"""A trie laid out flat: what the model reads, and the way back to the samples."""

from mcore_prefix_tree.layout.flat import FlatLayout, fold
from mcore_prefix_tree.layout.padding import NO_PADDING, Padding

__all__ = ["NO_PADDING", "FlatLayout", "Padding", "fold"]
