"""S samples in C clusters that must each share a micro-batch, for example the sides of a preference pair."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.cuts import Run
from mcore_prefix_tree.plan.pack import Leaves

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Clusters:
    """Clusters in the order of their first samples, to be cut into runs like samples.

    The cost of a run of clusters by ``context`` and ``fresh`` is never less than its unique tokens: for two neighbours
    it counts only the common tokens of their first samples once.

    Attributes:
        members: places of each cluster's samples in the depth-first order, increasing.
        context: int64 ``[C]``, tokens that each cluster's first sample has in common with the first one of the cluster
            before.
        fresh: int64 ``[C]``, its other unique tokens.
    """

    members: list[Int64Array]
    context: Int64Array
    fresh: Int64Array

    @classmethod
    def of(cls, keys: Sequence[Hashable], leaves: Leaves) -> Clusters:
        """Put the samples together that have the same key; None leaves a sample free. Both are in depth-first order."""
        members: dict[Hashable, list[int]] = {}
        for place, key in enumerate(keys):
            members.setdefault(("free", place) if key is None else ("kept", key), []).append(place)
        arrays = [np.array(places, dtype=np.int64) for places in members.values()]
        first = np.array([places[0] for places in arrays], dtype=np.int64)
        # Two samples have as many tokens in common as the least similar neighbours between them.
        context = leaves.some(first).context
        tokens = np.array([leaves.some(places).tokens for places in arrays], dtype=np.int64)
        return cls(members=arrays, context=context, fresh=tokens - context)

    @property
    def tokens(self) -> Int64Array:
        """int64 ``[C]``, unique tokens of each by itself."""
        return self.context + self.fresh

    def places(self, run: Run) -> Int64Array:
        """The samples of a run of clusters, in depth-first order."""
        return np.sort(np.concatenate(self.members[slice(*run)]))
