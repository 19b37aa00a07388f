"""Cuts of a tree above the budget into chunks that read keys and values of the ones before.

A step trains the chunks in reverse order, each a micro-batch, so that a token's descendants have left their gradients
before its own backward. The tokens that chunks read (the carried ones) run forward once more, before the first chunk
that reads them. These runs, the first pass, are micro-batches of the step too, so little more than the keys and values
of one path is held at once. See :mod:`mcore_prefix_tree.layout.tree_chunks`. One data-parallel rank has all chunks of a
tree.

Legend: T tokens of a tree, in depth-first order; C chunks; X carried tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from mcore_prefix_tree.plan.cost import CostModel
from mcore_prefix_tree.plan.cuts import Int64Array, least_repeating_runs
from mcore_prefix_tree.plan.pack import Leaves

FORWARD = 1 / 3  # of the cost of a token's forward and backward


class TreePart(NamedTuple):
    """Part of a tree that one micro-batch runs: a chunk, or with ``forward_only`` a part of the first pass."""

    # start, end: tokens it runs. A chunk's are flat tokens of the tree; those of a first pass are carried tokens, in
    # the order of the chunks that read them first.
    start: int
    end: int
    carried: int  # number of a chunk's tokens that later chunks read
    stack: int  # number of tokens before it that it reads
    forward_only: bool = False
    # Number of tokens on the path to a chunk after which a chunk begins with states of recurrent layers.
    states: int = 0

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def is_chunk(self) -> bool:
        return self.tokens > 0 and not self.forward_only


# Of a micro-batch of whole samples, or without any.
WHOLE = TreePart(0, 0, 0, 0)
# A rank's part in a first pass of others: all ranks run forward only at the same time, as experts on several need it.
IDLE = TreePart(0, 0, 0, 0, forward_only=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class CarriedTree:
    """A tree above the budget, or several that samples of one pair are in."""

    samples: tuple[int, ...]  # indices of its samples, in depth-first order
    chunks: tuple[TreePart, ...]  # its chunks, in depth-first order
    units: int  # cost of its step, in the units of the cost model, passes before included
    has_to: bool  # whether it cannot be cut between samples: one, or some that stay together, are above the budget
    saves: bool  # whether it costs less in chunks than cut between samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Carrying:
    """One rank's chunks in a plan."""

    # For each of the rank's micro-batches the part of a tree that it runs, or WHOLE for whole samples.
    runs: tuple[TreePart, ...]
    # When a step trains, the last chunk of a tree runs first, and before each chunk the first pass over the tokens that
    # the chunk reads. Without a backward, the first chunk runs first and keeps the keys that later chunks read.
    trains: bool = True
    # Places of the micro-batches that a scoring pass runs before the step, in its order, the same on all ranks: each
    # rank's chunks, from the first to the last. Empty if the loss needs none.
    scored: tuple[int, ...] = ()

    def trees(self, cuts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[TreePart]]:
        """Return the parts of each tree by its samples; ``cuts`` has those of each micro-batch."""
        found: dict[tuple[int, ...], list[TreePart]] = {}
        for samples, run in zip(cuts, self.runs, strict=True):
            if run.tokens:
                found.setdefault(tuple(samples), []).append(run)
        return found

    @property
    def carried_tokens(self) -> int:
        return sum(run.tokens for run in self.runs if run.forward_only)

    @property
    def scored_tokens(self) -> int:
        return sum(run.tokens for run in self.runs if run.is_chunk) if self.scored else 0

    @property
    def held_states(self) -> int:
        """Most tokens after which the states of recurrent layers are held at once."""
        return max(run.states for run in self.runs)

    @property
    def held_tokens(self) -> int:
        """Most tokens whose keys and values are held at once by a stage with one micro-batch in flight."""
        held = most = 0
        for run in self.runs:
            held += run.tokens if run.forward_only else -run.carried
            most = max(most, held)
        return most


@dataclass(frozen=True, kw_only=True, eq=False)
class ForestPlan:
    """Samples that each micro-batch of a step holds.

    Attributes:
        micro_batches: indices of the samples of each micro-batch, by data-parallel rank, then by micro-batch; an empty
            tuple is a micro-batch of padding. All ranks have the same number.
        physical_tokens: unique tokens of each micro-batch, before padding; counts an ancestor once per micro-batch that
            computes it, and 0 for a micro-batch of the first pass over carried tokens.
        carrying: each rank's parts of trees above the budget; the micro-batch of a part names all samples of its tree.
            None without any.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    physical_tokens: tuple[tuple[int, ...], ...]
    carrying: tuple[Carrying, ...] | None = None

    def carrying_of(self, rank: int) -> Carrying | None:
        return None if self.carrying is None else self.carrying[rank]

    @property
    def carried_tokens(self) -> int:
        """Tokens that the first passes of all ranks compute in addition, forward only."""
        return sum(rank.carried_tokens for rank in self.carrying or ())

    @property
    def scored_tokens(self) -> int:
        """Tokens that the scoring passes of all ranks compute in addition, forward only."""
        return sum(rank.scored_tokens for rank in self.carrying or ())

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])

    @property
    def idle_ranks(self) -> int:
        """Data-parallel ranks without any sample."""
        return sum(not any(rank) for rank in self.micro_batches)


def cut_tree(
    position: Int64Array, max_tokens: int, *, state_tokens: int = 0, full: bool = False
) -> tuple[TreePart, ...]:
    """Cut a tree into chunks of at most ``max_tokens``, where few tokens are carried.

    A chunk ends where the smallest part of it is carried, in its second half, so that no chunk but the last is less
    than half full; O(T).

    Args:
        position: int64 ``[T]``, depth of each token on its path, in depth-first order.
        max_tokens: tokens of a chunk.
        state_tokens: see :class:`CostModel`.
        full: whether to fill every chunk but the last, for the fewest.
    """
    room = np.ones(len(position), dtype=np.int64)
    joins = np.flatnonzero(np.diff(position) <= 0) + 1
    room[joins] += np.minimum(state_tokens, position[joins])
    filled = np.append(0, np.cumsum(room))
    borders = [0]
    while (start := borders[-1]) < len(position):
        # The first path of a chunk joins none in it.
        most = int(np.searchsorted(filled, filled[start + 1] - 1 + max_tokens, side="right")) - 1 - start
        if start + most >= len(position):
            borders.append(len(position))
            break
        window = position[start : start + most + 1]
        carried = window - np.minimum.accumulate(window)
        middle = most if full else (most + 1) // 2
        part = carried[middle:] / np.arange(middle, most + 1)
        # Of equal parts the last one.
        borders.append(start + most - int(np.argmin(part[::-1])))
    return make_chunks(position, borders)


def make_chunks(position: Int64Array, borders: Sequence[int]) -> tuple[TreePart, ...]:
    """Return the chunks from border to border; ``position`` is int64 ``[T]``.

    Of the stack at a chunk's end, the tokens above the chunk's least deep one are older: all others are its own.
    """
    ranges = [*pairwise(borders)]
    least = [int(position[start : end + 1].min()) for start, end in ranges]
    return tuple(
        TreePart(
            start, end, 0 if end == len(position) else int(position[end]) - low, int(position[start]), states=states
        )
        for (start, end), low, states in zip(ranges, least, _count_states(position, ranges, least), strict=True)
    )


def _count_states(position: Int64Array, ranges: Sequence[tuple[int, int]], least: Sequence[int]) -> list[int]:
    """Return :attr:`TreePart.states` of chunks, and of next tokens, whose least depths are ``least``."""
    # Depths of the tokens before a chunk that its own follow.
    followed = [set((np.unique(np.minimum.accumulate(position[slice(*part)])) - 1).tolist()) - {-1} for part in ranges]
    live, of_before = set[int](), []
    for own, low in zip(followed, least, strict=True):
        of_before.append(live)
        live = {depth for depth in live | own if depth < low}
    live, counts = set[int](), []
    for own, low, before in zip(followed[::-1], least[::-1], of_before[::-1], strict=True):
        live = {depth for depth in live if depth < low} | own
        counts.append(len(live | before))
    return counts[::-1]


def new_depths(chunks: Sequence[TreePart]) -> Iterator[tuple[TreePart, int, int]]:
    """Yield the chunks of a tree, the last one first, and the depths, from and to, of what no chunk before read."""
    common = 0
    for chunk, before in zip(chunks[::-1], [*chunks[-2::-1], None], strict=True):
        yield chunk, common, chunk.stack
        # The path to a chunk's end has this many tokens in common with the path to its start.
        common = 0 if before is None else chunk.stack - before.carried


def first_pass_depths(chunks: Sequence[TreePart]) -> Int64Array:
    """Return the depth of each token of a tree's first pass, int64 ``[X]``."""
    return np.concatenate([np.arange(start, end) for _, start, end in new_depths(chunks)])


def with_first_pass(chunks: Sequence[TreePart], max_tokens: int) -> Iterator[TreePart]:
    """Yield the micro-batches of a tree's training; those of the first pass are as few and as even as they can be."""
    depths = first_pass_depths(chunks)
    count = -(-len(depths) // max_tokens)
    borders = [len(depths) * number // max(count, 1) for number in range(count + 1)]
    passes = [TreePart(*ends, 0, int(depths[ends[0]]), forward_only=True) for ends in pairwise(borders)]
    read = 0
    for chunk, start, end in new_depths(chunks):
        read += end - start
        while passes and passes[0].start < read:
            yield passes.pop(0)
        yield chunk


# Samples, tokens, and the part of a tree.
CarriedMicroBatch: TypeAlias = "tuple[tuple[int, ...], int, TreePart]"


def in_step(rows: Sequence[Sequence[CarriedMicroBatch]]) -> list[list[CarriedMicroBatch]]:
    """Return the rows of all ranks with the first pass at the same places, and as many micro-batches on each.

    Where one rank needs it, the others run some of theirs ahead: the longest first pass of a rank is that of all.
    """
    waiting, placed = [list(row) for row in rows], [list[CarriedMicroBatch]() for _ in rows]
    while any(waiting):
        is_pass = any(row and row[0][2].forward_only for row in waiting)
        for own, row in zip(placed, waiting, strict=True):
            places = (at for at, (_, _, run) in enumerate(row) if run.forward_only or not is_pass)
            at = next(places, None)
            own.append(row.pop(at) if at is not None else ((), 0, IDLE if is_pass else WHOLE))
    return placed


def scored_places(rows: Sequence[Sequence[CarriedMicroBatch]], multiple: int, *, trains: bool) -> tuple[int, ...]:
    """Return the places that a scoring pass runs, see :class:`Carrying`: a multiple of ``multiple``, as all rows are.

    Where only other ranks have a chunk, a rank runs an empty micro-batch.
    """
    has_chunk = [any(run.is_chunk for _, _, run in place) for place in zip(*rows, strict=True)]
    count = -(-sum(has_chunk) // multiple) * multiple
    places = sorted(sorted(range(len(has_chunk)), key=lambda at: not has_chunk[at])[:count])
    return tuple(places[::-1] if trains else places)


def _carry_tree(
    leaves: Leaves, max_tokens: int, cost_model: CostModel, *, full: bool, scores_first: bool
) -> tuple[tuple[TreePart, ...], int]:
    """Return a tree's chunks and cost; ``leaves`` are its samples in order. For the rest see :func:`carried_trees`."""
    ranges = zip(leaves.context.tolist(), leaves.length.tolist(), strict=True)
    position = np.concatenate([np.arange(start, end) for start, end in ranges])
    chunks = cut_tree(position, max_tokens, state_tokens=cost_model.state_tokens, full=full)
    # Carried tokens of a chunk are the last ones on the path to its end.
    ends = np.array([position[chunk.end] if chunk.carried else 0 for chunk in chunks], dtype=np.int64)
    carried = np.array([chunk.carried for chunk in chunks], dtype=np.int64)
    first = cost_model.units_of_path(ends) - cost_model.units_of_path(ends - carried)
    units = (1 + FORWARD * scores_first) * _unique_units(leaves, cost_model) + FORWARD * first.sum()
    runs = len(list(with_first_pass(chunks, max_tokens))) + scores_first * len(chunks)
    return chunks, int(units + runs * cost_model.units_of_micro_batch)


def _unique_units(leaves: Leaves, cost_model: CostModel) -> int:
    """Return the cost of the unique tokens of samples."""
    path = cost_model.units_of_path(leaves.length) - cost_model.units_of_path(leaves.context)
    return int((path + cost_model.units_of_scored(leaves.scored)).sum())


def _repeat_units(leaves: Leaves, max_tokens: int, cost_model: CostModel) -> int:
    """Return the cost of a tree cut between samples, each side with its ancestors."""
    saved, repeats = leaves.saved_tokens(cost_model), cost_model.units_of_path(leaves.context)
    runs = least_repeating_runs(saved, leaves.length - saved, max_tokens)
    again = sum(int(repeats[start]) for start, _ in runs) + len(runs) * cost_model.units_of_micro_batch
    return _unique_units(leaves, cost_model) + again


def carried_trees(
    order: Int64Array,
    leaves: Leaves,
    max_tokens: int,
    cost_model: CostModel,
    *,
    together: Sequence[Hashable] | None = None,
    scores_first: bool = False,
    full: bool = False,
) -> list[CarriedTree]:
    """Return the trees above the budget in chunks; ``leaves`` are all samples, whose indices are ``order``, ``[S]``.

    ``together`` has a key for each sample, in that order; trees whose samples have equal keys count as one tree. With
    ``scores_first`` all chunks run forward once more.
    """
    trees = []
    for own in _whole_trees(np.flatnonzero(leaves.context == 0), together, len(order)):
        some = leaves.some(own)
        if some.room(cost_model) <= max_tokens:
            continue
        kept: dict[Hashable, list[int]] = {}
        for place, at in enumerate(own.tolist() if together is not None else ()):
            if together is not None and together[at] is not None:
                kept.setdefault(together[at], []).append(place)
        rooms = [some.some(np.array(places)).room(cost_model) for places in kept.values()]
        has_to = max([int(some.length.max()), *rooms]) > max_tokens
        chunks, units = _carry_tree(some, max_tokens, cost_model, full=full, scores_first=scores_first)
        saves = has_to or units < _repeat_units(some, max_tokens, cost_model)
        trees.append(
            CarriedTree(samples=tuple(order[own].tolist()), chunks=chunks, units=units, has_to=has_to, saves=saves)
        )
    return trees


def _whole_trees(roots: Int64Array, together: Sequence[Hashable] | None, samples: int) -> list[Int64Array]:
    """Return the places of each tree's samples, or of trees that samples which stay together join."""
    # roots, int64 [n], are the places of their first samples.
    trees = np.split(np.arange(samples), roots[1:])
    if together is None:
        return trees
    joined = list(range(len(trees)))

    def first(number: int) -> int:
        while joined[number] != number:
            joined[number] = number = joined[joined[number]]
        return number

    seen: dict[Hashable, int] = {}
    for number, places in enumerate(trees):
        for key in {together[place] for place in places.tolist()} - {None}:
            one, other = first(seen.setdefault(key, number)), first(number)
            joined[max(one, other)] = min(one, other)
    members: dict[int, list[Int64Array]] = {}
    for number, places in enumerate(trees):
        members.setdefault(first(number), []).append(places)
    return [np.concatenate(parts) for parts in members.values()]
