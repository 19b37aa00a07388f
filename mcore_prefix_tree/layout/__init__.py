"""A trie laid out flat as the model's input, and the map back to the samples."""

from mcore_prefix_tree.layout.flat import NO_PADDING, FlatLayout, Padding, fold, row_multiple
