"""Order the rows of a step so that verl gives complete groups to a data-parallel rank.

verl cuts a batch into one run of rows per data-parallel rank, and each run into the rank's mini-batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan import deal
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import sort_samples


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that share prefixes, or some of them, as neighbours in their trie."""

    rows: tuple[int, ...]
    length: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]  # tokens that each row has in common with the row before; entry 0 is unused

    @property
    def unique_tokens(self) -> int:
        return int(self.length.sum() - self.shared[1:].sum())

    def cut(self, rows: int) -> tuple[Group, Group]:
        """Split into the first ``rows`` rows and the others."""
        return (
            Group(self.rows[:rows], self.length[:rows], self.shared[:rows]),
            Group(self.rows[rows:], self.length[rows:], self.shared[rows:]),
        )


def group_rows(tokens: Sequence[npt.NDArray[np.int32]], keys: Sequence[Hashable]) -> list[Group]:
    """Return the groups of a batch, in the order of their first rows, int32 ``[n]`` each; a group has one key."""
    members: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    groups = []
    for rows in members.values():
        order, shared = sort_samples([Sample(tokens=tokens[row]) for row in rows])
        rows = [rows[index] for index in order.tolist()]
        length = np.array([len(tokens[row]) for row in rows], dtype=np.int64)
        groups.append(Group(tuple(rows), length, shared))
    return groups


def deal_groups(groups: Sequence[Group], *, ranks: int, mini_batches: int) -> list[list[list[Group]]]:
    """Return the groups of each mini-batch of each rank, all with the same number of rows.

    Mini-batches, the ranks within each, and the ranks in total get about the same number of unique tokens. A group is
    cut only if it does not fit into the room that other groups leave. ``mini_batches`` is the number of updates of the
    step; ``ranks * mini_batches`` divides the number of rows.
    """
    dealt: list[list[list[Group]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for step in _split(groups, mini_batches):
        parts = sorted(_split(step, ranks), key=_unique_tokens)
        for rank, part in zip(sorted(range(ranks), key=lambda rank: -load[rank]), parts, strict=True):
            dealt[rank].append(part)
            load[rank] += _unique_tokens(part)
    return _exchange(dealt)


def _exchange(dealt: Sequence[Sequence[Sequence[Group]]]) -> list[list[list[Group]]]:
    """Exchange groups within mini-batches to lower the total of the fullest rank, but raise no mini-batch's fullest."""
    # A rank that one long group fills in a mini-batch gets short groups in the others.
    groups = [group for steps in dealt for step in steps for group in step]
    places = [(rank, at) for rank, steps in enumerate(dealt) for at, step in enumerate(steps) for _ in step]
    rank, step = np.array(places, dtype=np.int64).reshape(-1, 2).T.copy()
    cost = np.array([group.unique_tokens for group in groups], dtype=np.int64)
    rows = np.array([len(group.rows) for group in groups], dtype=np.int64)
    load = np.zeros((len(dealt), len(dealt[0])), dtype=np.int64)
    np.add.at(load, (rank, step), cost)
    for _ in range(4 * len(dealt)):
        total = load.sum(axis=1)
        fullest = int(total.argmax())
        mine = np.flatnonzero(rank == fullest)
        gain = cost[mine][:, None] - cost
        after = np.maximum(total[fullest] - gain, total[rank] + gain)
        fits = load[rank, step] + gain <= load.max(axis=0)[step]
        after[~(fits & (step[mine][:, None] == step) & (rows[mine][:, None] == rows))] = total[fullest]
        best = int(after.argmin())
        if after.flat[best] == total[fullest]:
            break
        one, other = mine[best // len(groups)], best % len(groups)
        load[[rank[one], rank[other]], step[one]] += (cost[other] - cost[one]) * np.array([1, -1])
        rank[one], rank[other] = rank[other], rank[one]
    exchanged: list[list[list[Group]]] = [[[] for _ in steps] for steps in dealt]
    for group, to, at in zip(groups, rank.tolist(), step.tolist(), strict=True):
        exchanged[to][at].append(group)
    return exchanged


def _unique_tokens(groups: Sequence[Group]) -> int:
    return sum(group.unique_tokens for group in groups)


def _split(groups: Sequence[Group], parts: int) -> list[list[Group]]:
    """Split groups into parts of as many rows."""
    room = sum(len(group.rows) for group in groups) // parts
    dealt = deal(
        [group.unique_tokens for group in groups], parts, size=[len(group.rows) for group in groups], room=room
    )
    split = [[groups[index] for index in part] for part in dealt.ranks]
    free = [room - sum(len(group.rows) for group in part) for part in split]
    for left in (groups[index] for index in dealt.left):
        while left.rows:
            part = max(range(parts), key=free.__getitem__)
            piece, left = left.cut(min(free[part], len(left.rows)))
            split[part].append(piece)
            free[part] -= len(piece.rows)
    return split
