"""Cuts of a tree above the budget into chunks that read keys and values of the ones before.

A step runs such a tree in two passes: first, forward only, the tokens that later chunks read (the carried ones), then
all chunks in reverse order, each a micro-batch, so that a token's descendants have left their gradients before its own
backward. See :mod:`mcore_prefix_tree.layout.tree_chunks`. One data-parallel rank has all chunks of a tree.

Legend: T tokens of a tree, in depth-first order; C chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN, CostModel
from mcore_prefix_tree.plan.cuts import Int64Array, least_repeating_runs

FORWARD = 1 / 3  # of the cost of a token's forward and backward


class Chunk(NamedTuple):
    """The flat tokens ``start:end`` of a tree, of which later chunks read ``carried``."""

    start: int
    end: int
    carried: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CarriedTree:
    """A tree above the budget.

    Attributes:
        samples: indices of its samples, in depth-first order.
        chunks: its chunks, in depth-first order.
        units: cost of its step, in the units of the cost model, first pass included; tokens without one.
    """

    samples: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    units: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Carrying:
    """One rank's chunks in a plan.

    Attributes:
        chunks: chunk that each of the rank's micro-batches runs; None for a micro-batch of whole samples. Those of one
            tree follow each other, the last one first.
        first_pass: micro-batches of the first pass, the same number on every rank.
        max_tokens: largest number of tokens of each.
    """

    chunks: tuple[Chunk | None, ...]
    first_pass: int
    max_tokens: int

    @property
    def carried_tokens(self) -> int:
        return sum(chunk.carried for chunk in self.chunks if chunk is not None)


def cut_tree(position: Int64Array, max_tokens: int, *, full: bool = False) -> tuple[Chunk, ...]:
    """Cut a tree into chunks of at most ``max_tokens``, where few tokens are carried.

    A chunk ends where the smallest part of it is carried, in its second half, so that no chunk but the last is less
    than half full; O(T).

    Args:
        position: int64 ``[T]``, depth of each token on its path, in depth-first order.
        full: whether to fill every chunk but the last, for the fewest.
    """
    borders = [0]
    while len(position) - borders[-1] > max_tokens:
        window = position[borders[-1] : borders[-1] + max_tokens + 1]
        carried = window - np.minimum.accumulate(window)
        middle = max_tokens if full else (max_tokens + 1) // 2
        part = carried[middle:] / np.arange(middle, max_tokens + 1)
        # Of equal parts the last one.
        borders.append(borders[-1] + max_tokens - int(np.argmin(part[::-1])))
    return make_chunks(position, [*borders, len(position)])


def make_chunks(position: Int64Array, borders: Sequence[int]) -> tuple[Chunk, ...]:
    """Return the chunks from border to border; ``position`` is int64 ``[T]``.

    Of the stack at a chunk's end, the tokens above the chunk's least deep one are older: all others are its own.
    """
    return tuple(
        Chunk(start, end, 0 if end == len(position) else int(position[end] - position[start : end + 1].min()))
        for start, end in pairwise(borders)
    )


def first_pass(chunks: Sequence[Chunk], max_tokens: int) -> Iterator[slice]:
    """Yield the chunks of a tree whose carried tokens run together in the first pass."""
    start = tokens = 0
    for number, chunk in enumerate(chunks):
        if tokens + chunk.carried > max_tokens:
            yield slice(start, number)
            start, tokens = number, 0
        tokens += chunk.carried
    if tokens:
        yield slice(start, len(chunks))


def carry_tree(
    samples: tuple[int, ...],
    shared: Int64Array,
    lengths: Int64Array,
    max_tokens: int,
    cost_model: CostModel | None,
    *,
    full: bool = False,
) -> CarriedTree:
    """Return a tree's chunks and cost; ``shared`` and ``lengths``, int64 ``[S]``, are of its samples in order."""
    position = np.concatenate(
        [np.arange(start, end) for start, end in zip(shared.tolist(), lengths.tolist(), strict=True)]
    )
    chunks = cut_tree(position, max_tokens, full=full)
    # Carried tokens of a chunk are the last ones on the path to its end.
    ends = np.array([position[chunk.end] if chunk.carried else 0 for chunk in chunks], dtype=np.int64)
    carried = np.array([chunk.carried for chunk in chunks], dtype=np.int64)
    first = units_of_path(ends, cost_model) - units_of_path(ends - carried, cost_model)
    fresh = units_of_path(lengths, cost_model) - units_of_path(shared, cost_model)
    # Most back-ends attend for the tokens of a stack again, though nobody reads that.
    stack = np.array([position[chunk.start] for chunk in chunks], dtype=np.int64)
    again = units_of_path(stack, cost_model) - (stack if cost_model is None else stack * UNITS_PER_TOKEN)
    runs = len(chunks) + len(list(first_pass(chunks, max_tokens)))
    overhead = 0 if cost_model is None else runs * cost_model.units_of_micro_batch
    return CarriedTree(
        samples=samples, chunks=chunks, units=int(fresh.sum() + again.sum() + FORWARD * first.sum()) + overhead
    )


def repeat_units(shared: Int64Array, lengths: Int64Array, max_tokens: int, cost_model: CostModel | None) -> int | None:
    """Return the cost of a tree cut between samples, each side with its ancestors; None if a sample is too long."""
    if int(lengths.max()) > max_tokens:
        return None
    context = units_of_path(shared, cost_model)
    runs = least_repeating_runs(shared, lengths - shared, max_tokens)
    again = sum(int(context[start]) for start, _ in runs)
    overhead = 0 if cost_model is None else len(runs) * cost_model.units_of_micro_batch
    return int((units_of_path(lengths, cost_model) - context).sum()) + again + overhead


def units_of_path(lengths: Int64Array, cost_model: CostModel | None) -> Int64Array:
    """Return the cost of paths, int64 ``[n]``: their tokens without a cost model."""
    return lengths if cost_model is None else cost_model.units_of_path(lengths)
