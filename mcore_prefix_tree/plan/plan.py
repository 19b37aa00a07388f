"""Cut a step's samples into micro-batches under a token budget and deal them to data-parallel ranks.

In depth-first order the samples of a subtree are neighbours, so a micro-batch is a run of that order. Where a cut goes
through a tree, both sides compute the shared ancestors; every sample still belongs to exactly one micro-batch, so the
step's gradient does not depend on the cuts. The plan is a function of the samples' content: every rank computes the
same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.trie import sort_samples


class BudgetError(SampleError):
    """A single sample is longer than a micro-batch may be."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForestPlan:
    """Which samples each micro-batch of a step holds.

    Attributes:
        micro_batches: by data-parallel rank, then by micro-batch, the indices of its samples; an empty tuple is a
            micro-batch of padding. All ranks have the same number.
        physical_tokens: unique tokens of each, before padding; counts an ancestor once per micro-batch that needs it.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    physical_tokens: tuple[tuple[int, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per data-parallel rank."""
        return len(self.micro_batches[0])


def plan_step(
    samples: Sequence[Sample], *, max_tokens: int, dp_size: int = 1, micro_batch_multiple: int = 1
) -> ForestPlan:
    """Plan one step.

    Uses as few micro-batches per rank as the budget allows, then evens out their sizes.

    Args:
        samples: of the whole step, all ranks together.
        max_tokens: physical tokens that a micro-batch may hold, before padding.
        dp_size: data-parallel ranks.
        micro_batch_multiple: micro-batches per rank come in multiples of this (the pipeline size, where stages are
            interleaved).

    Raises:
        BudgetError: if one sample alone is longer than ``max_tokens``; names it and ``batch.max_tokens``.
    """
    for sample in samples:
        if len(sample) > max_tokens:
            raise BudgetError(
                f"{sample.source}: {len(sample)} tokens do not fit a micro-batch of batch.max_tokens={max_tokens}; "
                "raise batch.max_tokens or shorten the sample"
            )
    order, shared = sort_samples(samples)
    fresh = np.asarray([len(samples[index]) for index in order.tolist()], dtype=np.int64) - shared

    step = dp_size * micro_batch_multiple
    needed = len(_cut(shared, fresh, max_tokens))
    count = max(1, -(-needed // step)) * step
    # The smallest budget that still gives so few micro-batches makes the largest of them as small as it can be.
    low, high = int(max((len(sample) for sample in samples), default=1)), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(shared, fresh, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    runs = [
        (int(shared[start] + fresh[start:end].sum()), tuple(order[start:end].tolist()))
        for start, end in _cut(shared, fresh, low)
    ]
    runs += [(0, ())] * (count - len(runs))
    # Largest first, back and forth over the ranks: each rank gets as many, and about as much.
    runs.sort(key=lambda run: -run[0])
    dealt: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(dp_size)]
    for turn in range(count // dp_size):
        hand = runs[turn * dp_size : (turn + 1) * dp_size]
        for rank, run in enumerate(hand if turn % 2 == 0 else reversed(hand)):
            dealt[rank].append(run)
    return ForestPlan(
        micro_batches=tuple(tuple(run for _, run in rank) for rank in dealt),
        physical_tokens=tuple(tuple(tokens for tokens, _ in rank) for rank in dealt),
    )


def _cut(shared: np.ndarray, fresh: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Runs of the depth-first order, each as long as the budget allows."""
    runs = []
    start, tokens = 0, 0
    for index, (prefix, new) in enumerate(zip(shared.tolist(), fresh.tolist(), strict=True)):
        if index > start and tokens + new > budget:
            runs.append((start, index))
            start, tokens = index, 0
        # The first sample of a run brings its whole path.
        tokens += new + prefix if index == start else new
    if len(fresh):
        runs.append((start, len(fresh)))
    return runs
