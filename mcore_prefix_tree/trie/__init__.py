"""A trie of samples: the tokens that they share, and the samples that share them."""

from mcore_prefix_tree.trie.trie import (
    SHARE_ALL,
    Sharing,
    Trie,
    build_trie,
    common_prefix_length,
    sort_samples,
    trie_from_order,
)
