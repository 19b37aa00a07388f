"""A forest of samples by its nodes: counts and ratios, trees, and segments (chains without branching).

Legend: S samples, N nodes, G segments. Nothing here has an entry per token, so that files of any size can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import Trie

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Forest:
    """Folded samples by their nodes, which are numbered in depth-first pre-order.

    Attributes:
        cu_node_lens: int32 ``[N + 1]``, node n holds flat tokens ``cu_node_lens[n]:cu_node_lens[n + 1]``.
        node_parent: int32 ``[N]``, -1 for a root.
        node_depth: int32 ``[N]``, position of the node's first token on its path.
        cu_sample_lens: int64 ``[S + 1]``, sample s has the logical tokens ``cu_sample_lens[s]:cu_sample_lens[s + 1]``.
        sample_node: int32 ``[S]``, the node in which each sample ends.
        sample_order: int64 ``[S]``, the samples in depth-first order.
        sample_shared: int64 ``[S]``, leading tokens that each sample in that order has in common with the one before.
        num_supervised: logical tokens that have a predictor and a non-zero loss mask.
    """

    cu_node_lens: Int32Array
    node_parent: Int32Array
    node_depth: Int32Array
    cu_sample_lens: Int64Array
    sample_node: Int32Array
    sample_order: Int64Array
    sample_shared: Int64Array
    num_supervised: int

    @property
    def num_predictors(self) -> int:
        """Number of tokens that predict a token with a loss weight: the positions that a fused head projects.

        A token that predicts several, at a branch, counts once.
        """
        raise NotImplementedError

    @property
    def num_nodes(self) -> int:
        return len(self.node_parent)

    @property
    def num_samples(self) -> int:
        return len(self.cu_sample_lens) - 1

    @property
    def num_trees(self) -> int:
        return int(np.count_nonzero(self.node_parent < 0))

    @property
    def physical_tokens(self) -> int:
        """T, the unique tokens, before padding."""
        return int(self.cu_node_lens[-1])

    @property
    def logical_tokens(self) -> int:
        """L, the sum of the sample lengths."""
        return int(self.cu_sample_lens[-1])

    @property
    def fold_ratio(self) -> float:
        """Logical over physical tokens, which token-wise work shrinks by. 1 for an empty forest."""
        return self.logical_tokens / self.physical_tokens if self.physical_tokens else 1.0

    def count_pairs(self, keys: int | None = None) -> int:
        """Count the (query, key) pairs of attention, padding aside, where a query sees at most so many keys."""
        # A token sees the tokens before it on its path, and itself.
        first = self.node_depth.astype(np.int64) + 1
        end = first + np.diff(self.cu_node_lens.astype(np.int64))
        inside = (first, end) if keys is None else (np.minimum(first, keys + 1), np.minimum(end, keys + 1))
        pairs = (inside[1] * (inside[1] - 1) - inside[0] * (inside[0] - 1)) // 2
        if keys is not None:
            pairs += keys * (end - first - (inside[1] - inside[0]))
        return int(pairs.sum())

    @cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs that attention computes, padding aside."""
        return self.count_pairs()

    @cached_property
    def unfolded_pairs(self) -> int:
        """Number of (query, key) pairs that causal attention over each separate sample computes."""
        lengths = np.diff(self.cu_sample_lens)
        return int((lengths * (lengths + 1) // 2).sum())

    @property
    def predictor_ratio(self) -> float:
        """Supervised tokens over their predictors, which a fused head's work shrinks by. 1 if none is supervised."""
        return self.num_supervised / self.num_predictors if self.num_predictors else 1.0

    @property
    def pair_ratio(self) -> float:
        """Unfolded over visible pairs, which the work of attention shrinks by. 1 for an empty forest."""
        return self.unfolded_pairs / self.visible_pairs if self.visible_pairs else 1.0

    @cached_property
    def node_ends(self) -> Int64Array:
        """The node after the last one below each node, int64 ``[N]``."""
        ends = np.arange(1, self.num_nodes + 1)
        parents = self.node_parent.tolist()
        for node in range(self.num_nodes - 1, -1, -1):  # children before their parents
            if parents[node] >= 0:
                ends[parents[node]] = max(ends[parents[node]], ends[node])
        return ends

    @cached_property
    def samples_through(self) -> Int64Array:
        """Number of samples that have each node on their path, int64 ``[N]``."""
        ending = np.bincount(self.sample_node, minlength=self.num_nodes)
        before = np.concatenate([[0], np.cumsum(ending)])
        through: Int64Array = before[self.node_ends] - before[:-1]
        return through

    def counts(self) -> dict[str, int | float]:
        """Return all counts and ratios."""
        return {
            "samples": self.num_samples,
            "trees": self.num_trees,
            "nodes": self.num_nodes,
            "logical_tokens": self.logical_tokens,
            "physical_tokens": self.physical_tokens,
            "fold_ratio": self.fold_ratio,
            "unfolded_pairs": self.unfolded_pairs,
            "visible_pairs": self.visible_pairs,
            "pair_ratio": self.pair_ratio,
            "supervised_tokens": self.num_supervised,
            "predictors": self.num_predictors,
            "predictor_ratio": self.predictor_ratio,
            "longest_path": int(np.diff(self.cu_sample_lens).max(initial=0)),
            "deepest_node": max(_levels(self.node_parent), default=0),
            **branching(self.node_parent)._asdict(),
        }


def describe_nodes(samples: Sequence[Sample], trie: Trie, dtype: npt.DTypeLike = np.int64) -> dict[str, Any]:
    """Return the attributes of a :class:`Forest` that a trie of these samples determines."""
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    return {
        "cu_node_lens": trie.cu_node_lens.astype(dtype),
        "node_parent": trie.node_parent.astype(dtype),
        "node_depth": trie.node_depth.astype(dtype),
        "cu_sample_lens": np.append(0, np.cumsum(lengths)),
        "sample_node": trie.sample_node.astype(dtype),
        "sample_order": trie.order,
        "sample_shared": trie.shared,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleForest(Forest):
    """A forest beside its samples, in the caller's order; its tokens may be more than int32 counts."""

    samples: Sequence[Sample]

    @classmethod
    def of(cls, samples: Sequence[Sample], trie: Trie) -> SampleForest:
        """Describe samples by a trie of them."""
        supervised = sum(int(np.count_nonzero(sample.loss_mask[1:])) for sample in samples)
        return cls(**describe_nodes(samples, trie), num_supervised=supervised, samples=samples)

    @cached_property
    def num_predictors(self) -> int:
        found, lengths = 0, np.diff(self.cu_sample_lens)
        predicts = np.zeros(int(lengths.max(initial=0)), dtype=np.bool_)  # of the tokens on the path
        # After each sample the walk leaves the tokens that the next one does not share.
        left = np.append(self.sample_shared, 0)[1:]
        for index, keep in zip(self.sample_order.tolist(), left.tolist(), strict=True):
            mask = self.samples[index].loss_mask
            predicts[: len(mask) - 1] |= mask[1:] != 0
            found += int(np.count_nonzero(predicts[keep : len(mask)]))
            predicts[keep : len(mask)] = False
        return found

    @cached_property
    def _new_token_ends(self) -> Int64Array:
        """Flat end of the tokens that each sample adds, int64 ``[S]``, in depth-first order."""
        return np.cumsum(np.diff(self.cu_sample_lens)[self.sample_order] - self.sample_shared)

    def tokens(self, first: int, last: int) -> Int32Array:
        """Return the tokens of a chain of nodes, from its ``first`` to before its ``last``."""
        start, end = int(self.cu_node_lens[first]), int(self.cu_node_lens[last])
        # The sample that adds the chain's last token has the chain's other tokens too.
        at = int(np.searchsorted(self._new_token_ends, end - 1, side="right"))
        depth = int(self.node_depth[first])
        return self.samples[int(self.sample_order[at])].tokens[depth : depth + end - start]


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


def tokens_by_depth(forest: Forest) -> tuple[Int64Array, Int64Array]:
    """Count the tokens at each position of a path: ``[D]`` logical and ``[D]`` physical ones, D the longest path."""
    lengths = np.diff(forest.cu_node_lens.astype(np.int64))
    starts = forest.node_depth.astype(np.int64)
    longest = int((starts + lengths).max(initial=0))
    counts = []
    for weight in (forest.samples_through, np.ones(forest.num_nodes, dtype=np.int64)):
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


def largest_trees(forest: Forest, count: int) -> list[Tree]:
    """Return the ``count`` trees with the most physical tokens, largest first; ties in the order of the forest."""
    borders = forest.cu_node_lens.astype(np.int64)
    through, ends = forest.samples_through, forest.node_ends
    logical_before = np.concatenate([[0], np.cumsum(np.diff(borders) * through)])
    roots = np.flatnonzero(forest.node_parent < 0)
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
    """The nodes of a forest grouped into segments, numbered in depth-first pre-order, for drawing."""

    first_node: Int64Array  # int64 [G], node at which each segment begins; it ends before the next one
    children: list[list[int]]
    samples: Int64Array  # int64 [G], number of samples through its first node
    physical_tokens: Int64Array  # int64 [G], number of tokens of the segment and everything below it
    segment_of_node: Int64Array  # int64 [N], segment of each node


def chains(forest: Forest) -> Chains:
    """Group the nodes of a forest."""
    parent, is_first = forest.node_parent.astype(np.int64), starts_of_chains(forest.node_parent)
    first_node = np.flatnonzero(is_first)
    segment_of_node = np.cumsum(is_first) - 1
    children: list[list[int]] = [[] for _ in first_node]
    for segment, above in enumerate(parent[first_node].tolist()):
        if above >= 0:
            children[segment_of_node[above]].append(segment)
    borders = forest.cu_node_lens.astype(np.int64)
    return Chains(
        first_node=first_node,
        children=children,
        samples=forest.samples_through[first_node],
        physical_tokens=borders[forest.node_ends[first_node]] - borders[first_node],
        segment_of_node=segment_of_node,
    )


def starts_of_chains(node_parent: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """bool ``[N]``: roots and nodes with siblings; an only child continues its parent's chain, next to it."""
    starts = node_parent < 0
    above = node_parent[~starts]
    starts[~starts] = np.bincount(above, minlength=len(node_parent))[above] > 1
    return starts
