"""Counts and ratios of a layout of S samples in N nodes, and its trees' G segments (chains without branching)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.flat import starts_of_chains

Int64Array = npt.NDArray[np.int64]


def forest_counts(layout: FlatLayout) -> dict[str, int | float]:
    """Count a layout, padding aside; for the ratios see :class:`FlatLayout`."""
    return {
        "samples": layout.num_samples,
        "trees": layout.num_trees,
        "nodes": layout.num_nodes,
        "logical_tokens": layout.logical_tokens,
        "physical_tokens": layout.physical_tokens,
        "fold_ratio": layout.fold_ratio,
        "unfolded_pairs": layout.unfolded_pairs,
        "visible_pairs": layout.visible_pairs,
        "pair_ratio": layout.pair_ratio,
        "supervised_tokens": layout.num_supervised,
        "predictors": layout.num_predictors,
        "predictor_ratio": layout.predictor_ratio,
        "longest_path": int(np.diff(layout.cu_sample_lens).max(initial=0)),
        "deepest_node": max(_levels(layout.node_parent), default=0),
        **branching(layout.node_parent)._asdict(),
    }


class Branching(NamedTuple):
    """Segments, their levels, and those below a branch point, which start from a state in a recurrent layer."""

    segments: int
    segment_levels: int
    segment_states: int


NO_BRANCHES = Branching(0, 0, 0)


def branching(node_parent: npt.NDArray[np.integer]) -> Branching:
    """Count the segments of nodes in depth-first pre-order, ``[N]`` parents, -1 for a root."""
    starts = starts_of_chains(node_parent)
    parent = node_parent[starts]
    parent[parent >= 0] = (np.cumsum(starts) - 1)[parent[parent >= 0]]
    return Branching(len(parent), max(_levels(parent), default=0), int(np.count_nonzero(parent >= 0)))


def _levels(parents: npt.NDArray[np.integer]) -> list[int]:
    """``[N]``: nodes (or segments) on the path to each, itself included."""
    levels: list[int] = []
    for parent in parents.tolist():
        levels.append(1 + (levels[parent] if parent >= 0 else 0))
    return levels


def _subtree_ends(layout: FlatLayout) -> Int64Array:
    """``[N]``: the node after the last one below each node."""
    borders = layout.cu_node_lens.astype(np.int64)
    return np.searchsorted(borders, layout.subtree_end[borders[:-1]]).astype(np.int64)


def samples_through(layout: FlatLayout) -> Int64Array:
    """``[N]``: number of samples that have each node on their path."""
    ending = np.bincount(layout.sample_node, minlength=layout.num_nodes)
    before = np.concatenate([[0], np.cumsum(ending)])
    through: Int64Array = before[_subtree_ends(layout)] - before[:-1]
    return through


def tokens_by_depth(layout: FlatLayout) -> tuple[Int64Array, Int64Array]:
    """Count the tokens at each position of a path: ``[D]`` logical and ``[D]`` physical ones, D the longest path."""
    lengths = np.diff(layout.cu_node_lens.astype(np.int64))
    starts = layout.node_depth.astype(np.int64)
    longest = int((starts + lengths).max(initial=0))
    counts = []
    for weight in (samples_through(layout), np.ones(layout.num_nodes, dtype=np.int64)):
        change = np.zeros(longest + 1, dtype=np.int64)
        np.add.at(change, starts, weight)
        np.subtract.at(change, starts + lengths, weight)
        counts.append(np.cumsum(change[:-1]))
    return counts[0], counts[1]


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
    """The nodes of a layout grouped into segments, numbered in depth-first pre-order, for drawing."""

    first_node: Int64Array  # int64 [G], node at which each segment begins; it ends before the next one
    children: list[list[int]]
    samples: Int64Array  # int64 [G], number of samples through its first node
    physical_tokens: Int64Array  # int64 [G], number of tokens of the segment and everything below it
    segment_of_node: Int64Array  # int64 [N], segment of each node


def chains(layout: FlatLayout) -> Chains:
    """Group the nodes of a layout."""
    parent, is_first = layout.node_parent.astype(np.int64), starts_of_chains(layout.node_parent)
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
