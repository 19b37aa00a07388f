"""A lower bound of the slowest rank's cost over all assignments, not only runs, of a trie with N nodes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.cost import CostModel
from mcore_prefix_tree.trie import Trie

Int64Array = npt.NDArray[np.int64]


def least_makespan(
    trie: Trie,
    cost_model: CostModel,
    *,
    dp_size: int,
    micro_batches: int = 1,
    max_tokens: int | None = None,
    scored: Int64Array | None = None,
) -> int:
    """Return a lower bound of any plan's slowest rank, in units of :meth:`CostModel.units_of_path`.

    Say the slowest rank costs M. A rank that works below a node computes the path down to the node's end too, so only
    ``M - path`` remain for the nodes below. So at least ``ceil(below / (M - path))`` ranks compute that node; ``below``
    counts the nodes below as often as this rule repeats them, from the leaves up, and once the cost of scoring each
    sample, at its end, and of the segment that each leaf ends. The same with tokens and the budget counts
    micro-batches. If the forest with these repeats costs more than ``dp_size * M``, no plan reaches M; bisection finds
    the smallest M that this does not exclude. Also, M is at least the most expensive sample, and of the ``k * dp_size +
    1`` leaves with the most unshared cost, k + 1 meet on one rank.

    Args:
        max_tokens: largest number of physical tokens of a micro-batch, at least those of the longest sample; None for
            any number.
        scored: int64 ``[S]``, scored tokens of each sample in the trie's order of them: see ``plan.pack.first_scored``;
            None if scoring costs nothing.
    """
    overhead = cost_model.units_of_micro_batch * micro_batches
    if not trie.num_nodes:
        return overhead
    lengths = np.diff(trie.cu_node_lens)
    ends = trie.node_depth + lengths
    end_cost = cost_model.units_of_path(ends)
    own_cost = end_cost - cost_model.units_of_path(trie.node_depth)
    parent = trie.node_parent.tolist()
    scoring, most_scoring = np.zeros(trie.num_nodes, dtype=np.int64), np.zeros(trie.num_nodes, dtype=np.int64)
    if scored is not None:
        sample_scores = cost_model.units_of_scored(scored)
        np.add.at(scoring, trie.sample_node, sample_scores)
        np.maximum.at(most_scoring, trie.sample_node, sample_scores)
    for at_end in (scoring, most_scoring):
        at_end[_is_leaf(trie)] += cost_model.units_of_segment

    times = [1] * trie.num_nodes
    if max_tokens is not None:
        _repeats(parent, lengths.tolist(), (max_tokens - ends).tolist(), times, [0] * trie.num_nodes)

    def excluded(slowest: int) -> bool:
        # Bisection stays at or above the most expensive path, so no node is left without room that needs some.
        total = _repeats(parent, own_cost.tolist(), (slowest - end_cost).tolist(), times.copy(), scoring.tolist())
        return total > dp_size * slowest

    low = max(int((end_cost + most_scoring).max()), _meeting_leaves(trie, own_cost + most_scoring, dp_size))
    if not excluded(low):
        return low + overhead
    # The smallest M that is not excluded lies in (low, high].
    high = 2 * low
    while excluded(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 10_000):
        middle = (low + high) // 2
        if excluded(middle):
            low = middle
        else:
            high = middle
    return low + overhead


def _repeats(parent: list[int], own: list[int], room: list[int], times: list[int], below: list[int]) -> int:
    """Raise each node's ``times`` until ``room`` holds ``below``, at first the node ends; return the total cost."""
    total = 0
    for node in range(len(parent) - 1, -1, -1):
        if below[node] > room[node]:
            times[node] = max(times[node], -(-below[node] // room[node]))
        cost = below[node] + times[node] * own[node]
        if parent[node] >= 0:
            below[parent[node]] += cost
        else:
            total += cost
    return total


def _is_leaf(trie: Trie) -> npt.NDArray[np.bool_]:
    is_leaf = np.ones(trie.num_nodes, dtype=bool)
    is_leaf[trie.node_parent[trie.node_parent >= 0]] = False
    return is_leaf


def _meeting_leaves(trie: Trie, own_cost: Int64Array, dp_size: int) -> int:
    """Return the unshared cost of leaves that must meet on one rank; ``own_cost`` is int64 ``[N]``."""
    private = np.sort(own_cost[_is_leaf(trie)])[::-1]
    summed = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(private)])
    rounds = np.arange(1, (len(private) - 1) // dp_size + 1)
    meet = summed[rounds * dp_size + 1] - summed[rounds * dp_size - rounds]
    return int(meet.max(initial=0))
