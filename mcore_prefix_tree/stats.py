"""Counts and ratios of a layout, and the shape of each of its trees.

Legend: N nodes, G segments (maximal chains of nodes without branching), S samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout import FlatLayout

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ForestStats:
    """Counts of one layout.

    Attributes:
        samples: sequences given.
        trees: nodes without a parent.
        nodes: maximal token runs shared by the same set of samples.
        logical_tokens: sum of the sample lengths.
        physical_tokens: unique tokens.
        fold_ratio: logical over physical tokens: the bound of token-wise work alone.
        unfolded_pairs: (query, key) pairs of causal attention over each sample alone.
        visible_pairs: (query, key) pairs of tree attention.
        pair_ratio: unfolded over visible pairs: the bound of attention alone.
        supervised_tokens: logical tokens that have a predictor and a non-zero loss mask.
        predictors: unique tokens that predict one of these: the positions that a fused head projects.
        predictor_ratio: supervised tokens over predictors: the bound of a fused head alone.
        longest_path: tokens on the longest path; that is the longest sample.
        deepest_node: nodes on the path with the most nodes.
    """

    samples: int
    trees: int
    nodes: int
    logical_tokens: int
    physical_tokens: int
    fold_ratio: float
    unfolded_pairs: int
    visible_pairs: int
    pair_ratio: float
    supervised_tokens: int
    predictors: int
    predictor_ratio: float
    longest_path: int
    deepest_node: int


def forest_stats(layout: FlatLayout) -> ForestStats:
    """Count a layout, padding aside."""
    return ForestStats(
        samples=layout.num_samples,
        trees=layout.num_trees,
        nodes=layout.num_nodes,
        logical_tokens=layout.logical_tokens,
        physical_tokens=layout.physical_tokens,
        fold_ratio=layout.fold_ratio,
        unfolded_pairs=layout.unfolded_pairs,
        visible_pairs=layout.visible_pairs,
        pair_ratio=layout.pair_ratio,
        supervised_tokens=layout.num_supervised,
        predictors=layout.num_predictors,
        predictor_ratio=layout.predictor_ratio,
        longest_path=int(np.diff(layout.cu_sample_lens).max(initial=0)),
        deepest_node=int(_levels(layout).max(initial=0)),
    )


def _levels(layout: FlatLayout) -> Int64Array:
    """``[N]``: nodes on the path to each node, itself included."""
    levels: list[int] = []
    for parent in layout.node_parent.tolist():
        levels.append(1 + (levels[parent] if parent >= 0 else 0))
    return np.asarray(levels, dtype=np.int64)


def _subtree_ends(layout: FlatLayout) -> Int64Array:
    """``[N]``: the node after the last one below each node."""
    borders = layout.cu_node_lens.astype(np.int64)
    return np.searchsorted(borders, layout.subtree_end[borders[:-1]]).astype(np.int64)


def samples_through(layout: FlatLayout) -> Int64Array:
    """``[N]``: how many samples have each node on their path."""
    ending = np.bincount(layout.sample_node, minlength=layout.num_nodes)
    before = np.concatenate([[0], np.cumsum(ending)])
    through: Int64Array = before[_subtree_ends(layout)] - before[:-1]
    return through


class Tree(NamedTuple):
    """One tree of a forest."""

    root: int
    samples: int
    nodes: int
    logical_tokens: int
    physical_tokens: int


def largest_trees(layout: FlatLayout, count: int) -> list[Tree]:
    """Return the ``count`` trees with the most physical tokens, largest first; ties in the order of the layout."""
    borders = layout.cu_node_lens.astype(np.int64)
    through, ends = samples_through(layout), _subtree_ends(layout)
    logical_before = np.concatenate([[0], np.cumsum(np.diff(borders) * through)])
    roots = np.flatnonzero(layout.node_parent < 0)
    sizes = borders[ends[roots]] - borders[roots]
    chosen = roots[np.argsort(-sizes, kind="stable")[:count]]
    return [
        Tree(
            root=int(root),
            samples=int(through[root]),
            nodes=int(ends[root] - root),
            logical_tokens=int(logical_before[ends[root]] - logical_before[root]),
            physical_tokens=int(borders[ends[root]] - borders[root]),
        )
        for root in chosen
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """The nodes of a layout grouped into segments, numbered in depth-first pre-order, for drawing.

    Attributes:
        first_node: int64 ``[G]``, where each begins; it ends where the next begins.
        children: for each, the segments below it.
        samples: int64 ``[G]``, samples through its first node.
        physical_tokens: int64 ``[G]``, of the segment and everything below it.
        segment_of_node: int64 ``[N]``.
    """

    first_node: Int64Array
    children: list[list[int]]
    samples: Int64Array
    physical_tokens: Int64Array
    segment_of_node: Int64Array


def chains(layout: FlatLayout) -> Chains:
    """Group the nodes of a layout; a node that is its parent's only child continues the parent's segment."""
    parent = layout.node_parent.astype(np.int64)
    below = parent >= 0
    child_count = np.bincount(parent[below], minlength=layout.num_nodes)
    is_first = ~below
    is_first[below] = child_count[parent[below]] > 1
    first_node = np.flatnonzero(is_first)
    segment_of_node = np.cumsum(is_first) - 1
    children: list[list[int]] = [[] for _ in first_node]
    for segment, above in enumerate(parent[first_node].tolist()):
        if above >= 0:
            children[segment_of_node[above]].append(segment)
    borders = layout.cu_node_lens.astype(np.int64)
    return Chains(
        first_node=first_node,
        children=children,
        samples=samples_through(layout)[first_node],
        physical_tokens=borders[_subtree_ends(layout)[first_node]] - borders[first_node],
        segment_of_node=segment_of_node,
    )
