"""Samples to a trie: which tokens are shared, and by whom."""

from mcore_prefix_tree.trie.sort import Share, sort_samples
from mcore_prefix_tree.trie.trie import Trie, build_trie, trie_from_order

__all__ = ["Share", "Trie", "build_trie", "sort_samples", "trie_from_order"]
