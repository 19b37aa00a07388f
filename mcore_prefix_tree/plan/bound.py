"""A lower bound on the slowest rank's cost, over all assignments of the samples, not only runs of an order.

Legend: L leaves, N nodes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.cost import CostModel
from mcore_prefix_tree.trie import Trie

_STEPS = 40


def makespan_bound(
    trie: Trie, cost_model: CostModel, *, dp_size: int, micro_batches: int = 1, max_tokens: int | None = None
) -> float:
    """No plan of these samples has a slowest rank that costs less.

    Say the slowest rank costs M. A rank (or micro-batch) that works below a node computes the path down to the node's
    end too, which leaves ``M - path`` for what is below. So at least ``ceil(below / (M - path))`` ranks compute that
    node, and ``below`` counts the nodes below as often as this rule repeats them, from the leaves up. The same with
    tokens and the budget counts micro-batches. If the forest with these repeats costs more than ``dp_size * M``, no
    plan reaches M; bisection finds the smallest M that this does not exclude. Besides, M is at least the most expensive
    single sample; and of the ``k * dp_size + 1`` leaves that have most to themselves, k + 1 meet on one rank.

    Args:
        trie: of all samples.
        cost_model: of a micro-batch.
        dp_size: data-parallel ranks.
        micro_batches: of every rank; each costs ``cost_model.micro_batch``.
        max_tokens: physical tokens that a micro-batch may hold; None for any number.
    """
    overhead = cost_model.micro_batch * micro_batches
    if not trie.num_nodes:
        return overhead
    lengths = np.diff(trie.cu_node_lens)
    ends = trie.node_depth + lengths
    end_cost = cost_model.of_path(ends.astype(np.float64))
    own_cost = end_cost - cost_model.of_path(trie.node_depth.astype(np.float64))
    once = _repeats_of_tokens(trie.node_parent, lengths, ends, max_tokens)

    low = max(float(end_cost.max()), _meeting_leaves(trie, own_cost, dp_size))
    high = max(low, float((own_cost * once).sum()))
    if _total(trie.node_parent, own_cost, end_cost, once, low) <= dp_size * low:
        return low + overhead
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _total(trie.node_parent, own_cost, end_cost, once, middle) <= dp_size * middle:
            high = middle
        else:
            low = middle
        if high - low <= 1e-4 * high:
            break
    return low + overhead


def _repeats_of_tokens(
    parent: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], max_tokens: int | None
) -> npt.NDArray[np.int64]:
    """``[N]``: in how many micro-batches each node is at least, because of the token budget."""
    if max_tokens is None:
        return np.ones(len(parent), dtype=np.int64)
    below = [0] * len(parent)
    times = [1] * len(parent)
    room = (max_tokens - ends).tolist()
    own = lengths.tolist()
    above = parent.tolist()
    for node in range(len(parent) - 1, -1, -1):
        if below[node] > room[node]:
            times[node] = -(-below[node] // room[node])
        if above[node] >= 0:
            below[above[node]] += below[node] + times[node] * own[node]
    return np.asarray(times, dtype=np.int64)


def _total(
    parent: npt.NDArray[np.int64],
    own_cost: npt.NDArray[np.float64],
    end_cost: npt.NDArray[np.float64],
    once: npt.NDArray[np.int64],
    slowest: float,
) -> float:
    """What the forest costs at least if no rank may cost more than ``slowest``."""
    below = [0.0] * len(parent)
    total = 0.0
    # A hair less than the quotient, so that rounding never makes the bound too high.
    room = (slowest - end_cost).tolist()
    own, above, least = own_cost.tolist(), parent.tolist(), once.tolist()
    for node in range(len(parent) - 1, -1, -1):
        times = least[node]
        if below[node] > room[node]:
            if room[node] <= 0:
                return math.inf
            times = max(times, math.ceil(below[node] / room[node] - 1e-9))
        cost = below[node] + times * own[node]
        if above[node] >= 0:
            below[above[node]] += cost
        else:
            total += cost
    return total


def _meeting_leaves(trie: Trie, own_cost: npt.NDArray[np.float64], dp_size: int) -> float:
    is_leaf = np.ones(trie.num_nodes, dtype=bool)
    is_leaf[trie.node_parent[trie.node_parent >= 0]] = False
    private = np.sort(own_cost[is_leaf])[::-1]
    summed = np.concatenate([[0.0], np.cumsum(private)])
    rounds = np.arange(1, (len(private) - 1) // dp_size + 1)
    meet = summed[rounds * dp_size + 1] - summed[rounds * dp_size - rounds]
    return float(meet.max(initial=0.0))
