"""Samples to a trie: which tokens are shared, and by whom."""

from mcore_prefix_tree.trie.trie import Trie, build_trie, sort_samples

__all__ = ["Trie", "build_trie", "sort_samples"]
