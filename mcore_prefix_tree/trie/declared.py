"""Tries that a rollout engine already knows: prompt and completions, or a radix tree. Checked against the tokens.

Nothing is sorted; only what is declared to be shared is shared.

Legend: S samples, M declared nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.trie.sort import common_prefix_length
from mcore_prefix_tree.trie.trie import Trie, trie_from_order


def trie_from_groups(samples: Sequence[Sample], groups: Sequence[tuple[int, Sequence[int]]]) -> Trie:
    """The trie of prompts with several completions each: two levels, completions are not compared.

    Args:
        samples: prompt and completion of each.
        groups: ``(prompt_length, sample indices)`` of each; every sample is in exactly one.

    Raises:
        ValueError: if the groups do not hold every sample once, or a group is empty.
        SampleError: if a sample does not begin with its group's prompt or has another ``merge_key``; names both
            samples and where they differ.
    """
    order = np.array([index for _, members in groups for index in members], dtype=np.int64)
    if sorted(order.tolist()) != list(range(len(samples))):
        raise ValueError(f"groups must hold each of the {len(samples)} samples exactly once")
    shared = np.zeros(len(samples), dtype=np.int64)
    at = 0
    for number, (prompt_length, members) in enumerate(groups):
        if len(members) == 0 or prompt_length < 0:  # an array has no truth value
            raise ValueError(f"group {number} must have at least one sample and a prompt_length >= 0")
        first = samples[members[0]]
        for index in members:
            if len(samples[index]) < prompt_length:
                raise SampleError(
                    f"{samples[index].source}: {len(samples[index])} tokens are fewer than the declared prompt of "
                    f"{prompt_length} tokens"
                )
            if prompt_length:
                _check_shares(samples[index], first, prompt_length)
        shared[at + 1 : at + len(members)] = prompt_length
        at += len(members)
    return trie_from_order(order, shared, _lengths(samples)[order])


def trie_from_nodes(
    samples: Sequence[Sample],
    *,
    node_tokens: Sequence[npt.ArrayLike],
    node_parent: Sequence[int],
    sample_node: Sequence[int],
) -> Trie:
    """The trie that a radix tree describes.

    Nodes may come in any order and may be empty; what no sample passes through is left out, and a node whose samples
    are all its parent's becomes a part of it.

    Args:
        samples: the tokens of each are those on the path to its node.
        node_tokens: M token sequences.
        node_parent: ``[M]``, -1 for a root.
        sample_node: ``[S]``, the node at whose end each sample ends.

    Raises:
        ValueError: if the arrays do not describe a forest; names the node.
        SampleError: if a sample differs from the tokens on its path, or shares a node with a sample of another
            ``merge_key``; names the sample and where.
    """
    if len(node_parent) != len(node_tokens) or len(sample_node) != len(samples):
        raise ValueError(
            f"node_parent ({len(node_parent)}) needs an entry for each of {len(node_tokens)} node_tokens, and "
            f"sample_node ({len(sample_node)}) one for each of {len(samples)} samples"
        )
    tokens = [np.asarray(own) for own in node_tokens]
    visited, level, depth = _walk(tokens, node_parent)
    for index, node in enumerate(sample_node):
        if not 0 <= node < len(tokens) or node != int(node):
            raise ValueError(f"sample_node[{index}] = {node} is not one of {len(tokens)} nodes")

    rank = np.empty(len(tokens), dtype=np.int64)
    rank[visited] = np.arange(len(visited))
    ends_in = np.asarray(sample_node, dtype=np.int64)
    order = np.argsort(rank[ends_in], kind="stable")
    shared = np.zeros(len(samples), dtype=np.int64)
    path: list[int] = []  # nodes to the sample before
    previous: Sample | None = None
    for at, index in enumerate(order.tolist()):
        sample, node = samples[index], int(ends_in[index])
        if depth[node] + len(tokens[node]) != len(sample):
            raise SampleError(
                f"{sample.source}: {len(sample)} tokens, but the path to its node {node} has "
                f"{depth[node] + len(tokens[node])}"
            )
        fresh: list[int] = []
        while node >= 0 and not (level[node] < len(path) and path[level[node]] == node):
            fresh.append(node)
            node = node_parent[node]
        kept = level[node] + 1 if node >= 0 else 0
        if node >= 0:
            shared[at] = depth[node] + len(tokens[node])
        if shared[at]:
            assert previous is not None, "there is a path only after a sample"
            _check_shares(sample, previous, int(shared[at]))
        for new in reversed(fresh):
            own = sample.tokens[depth[new] : depth[new] + len(tokens[new])]
            if not np.array_equal(own, tokens[new]):
                first = depth[new] + common_prefix_length(own, tokens[new])
                raise SampleError(f"{sample.source}: token {first} differs from that of node {new} on its path")
        path[kept:] = reversed(fresh)
        previous = sample
    return trie_from_order(order, shared, _lengths(samples)[order])


def _walk(tokens: Sequence[npt.NDArray[np.integer]], parent: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Nodes in depth-first pre-order, and by node: nodes above it, tokens above it."""
    children: list[list[int]] = [[] for _ in tokens]
    roots: list[int] = []
    for node, above in enumerate(parent):
        if not -1 <= above < len(tokens) or above != int(above):
            raise ValueError(f"node_parent[{node}] = {above} is neither a node nor -1, the mark of a root")
        (roots if above < 0 else children[above]).append(node)
    level, depth = [0] * len(tokens), [0] * len(tokens)
    visited: list[int] = []
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        visited.append(node)
        for child in reversed(children[node]):
            level[child], depth[child] = level[node] + 1, depth[node] + len(tokens[node])
            stack.append(child)
    if len(visited) < len(tokens):
        node = min(set(range(len(tokens))) - set(visited))
        raise ValueError(f"node_parent leads from node {node} around a loop instead of to a root")
    return visited, level, depth


def _check_shares(sample: Sample, other: Sample, length: int) -> None:
    if sample.merge_key != other.merge_key:
        raise SampleError(
            f"{sample.source}: declared to share {length} tokens with {other.source}, but merge_key "
            f"{sample.merge_key!r} is not {other.merge_key!r}"
        )
    common = common_prefix_length(sample.tokens, other.tokens)
    if common < length:
        raise SampleError(
            f"{sample.source}: declared to share {length} tokens with {other.source}, but token {common} differs"
        )


def _lengths(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
