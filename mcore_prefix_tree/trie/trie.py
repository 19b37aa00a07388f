"""A trie over samples, built by sorting: neighbours in lexicographic order share the longest prefixes.

Sorting the samples and keeping only the tokens of each that its predecessor in that order does not have yields the
tokens of the trie in depth-first pre-order. The nodes follow from the longest common prefixes (LCPs) of neighbours with
one stack, as in the construction of a suffix tree from an LCP array (Kasai et al., CPM 2001). Nothing recurses and
nothing walks tokens in Python.

Legend: S samples, N nodes, T physical tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, check_samples
from mcore_prefix_tree.trie.sort import SHARE_ALL, Sharing, sort_samples

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trie:
    """A forest of token runs as a struct of arrays. Nodes are numbered in depth-first pre-order.

    Attributes:
        order: int64 ``[S]``, sample indices in depth-first order.
        shared: int64 ``[S]``, number of leading tokens that ``order[i]`` has in common with ``order[i - 1]``; its other
            tokens are new and follow those of ``order[i - 1]`` in the flat layout.
        cu_node_lens: int64 ``[N + 1]``, node n holds the flat tokens ``cu_node_lens[n]:cu_node_lens[n + 1]``.
        node_parent: int64 ``[N]``, -1 for a root.
        node_depth: int64 ``[N]``, position of the node's first token on its path.
        node_subtree_end: int64 ``[N]``, exclusive flat end of the node's subtree.
        sample_node: int64 ``[S]``, the node in which each sample (in the caller's order) ends.
    """

    order: IntArray
    shared: IntArray
    cu_node_lens: IntArray
    node_parent: IntArray
    node_depth: IntArray
    node_subtree_end: IntArray
    sample_node: IntArray

    @property
    def num_nodes(self) -> int:
        return len(self.node_parent)

    @property
    def num_tokens(self) -> int:
        """T, the physical tokens."""
        return int(self.cu_node_lens[-1])


def build_trie(samples: Sequence[Sample], sharing: Sharing = SHARE_ALL) -> Trie:
    """Fold any number of samples into a trie; those with different ``merge_key`` never share a node.

    A sample that is a prefix of another ends in an inner node, equal samples end in the same node.

    Raises:
        TypeError: something in ``samples`` is not a :class:`Sample`.
    """
    check_samples(samples)
    order, shared = sort_samples(samples, sharing)
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    return trie_from_order(order, shared, lengths[order])


def trie_from_order(order: IntArray, shared: IntArray, lengths: IntArray) -> Trie:
    """Build the nodes that an order of the samples implies.

    Args:
        order: int64 ``[S]``, a permutation of the samples in which those of every subtree are neighbours.
        shared: int64 ``[S]``, leading tokens in common with the sample before; ``shared[i]`` is at most the length of
            either, and ``shared[0]`` is 0.
        lengths: int64 ``[S]``, tokens of each sample, in that order.
    """
    # Node records in creation order; a split creates the upper part later than the lower one.
    start_depth: list[int] = []
    flat_start: list[int] = []
    flat_end: list[int] = []
    parent: list[int] = []
    subtree_end: list[int] = []
    sample_node = np.empty(len(order), dtype=np.int64)
    stack: list[int] = []  # the current path, root first
    flat = 0

    def new_node(depth: int, begin: int, end: int, above: int) -> int:
        start_depth.append(depth)
        flat_start.append(begin)
        flat_end.append(end)
        parent.append(above)
        subtree_end.append(-1)
        return len(parent) - 1

    for index, length, prefix in zip(order.tolist(), lengths.tolist(), shared.tolist(), strict=True):
        while stack and start_depth[stack[-1]] >= prefix:
            subtree_end[stack.pop()] = flat
        if stack:
            top = stack[-1]
            cut = flat_start[top] + prefix - start_depth[top]
            if cut < flat_end[top]:
                upper = new_node(start_depth[top], flat_start[top], cut, parent[top])
                parent[top], start_depth[top], flat_start[top] = upper, prefix, cut
                subtree_end[top] = flat
                stack[-1] = upper
        if length > prefix:
            stack.append(new_node(prefix, flat, flat + length - prefix, stack[-1] if stack else -1))
            flat += length - prefix
        sample_node[index] = stack[-1]
    for node in stack:
        subtree_end[node] = flat

    by_flat = np.argsort(np.asarray(flat_start, dtype=np.int64), kind="stable")
    number = np.empty(len(by_flat) + 1, dtype=np.int64)
    number[by_flat] = np.arange(len(by_flat))
    number[-1] = -1  # the parent of a root stays -1
    return Trie(
        order=order,
        shared=shared,
        cu_node_lens=np.append(np.asarray(flat_start, dtype=np.int64)[by_flat], flat),
        node_parent=number[np.asarray(parent, dtype=np.int64)][by_flat],
        node_depth=np.asarray(start_depth, dtype=np.int64)[by_flat],
        node_subtree_end=np.asarray(subtree_end, dtype=np.int64)[by_flat],
        sample_node=number[sample_node],
    )
