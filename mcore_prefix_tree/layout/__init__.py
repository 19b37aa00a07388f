"""A trie laid out flat as the model's input, and the map back to the samples."""

from mcore_prefix_tree.layout.flat import FlatLayout, fold
from mcore_prefix_tree.layout.padding import NO_PADDING, Padding

__all__ = ["NO_PADDING", "FlatLayout", "Padding", "fold"]
