"""Layout that folds S rows of token ids, L tokens, out of a trainer's T, which include padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout.flat import FlatLayout, fold
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import common_prefix_length, sort_samples, trie_from_order

Int64Array = npt.NDArray[np.int64]
Rows = TypeVar("Rows", bound="HostRows")


@dataclass(frozen=True, kw_only=True, eq=False)
class HostRows:
    """Rows of a trainer's micro-batch, on the host, without empty rows.

    ``ids`` is int64 ``[T]``; number in the micro-batch, start and length of each ``row`` are int64 ``[S]``; ``routes``
    are the experts of each token, integers ``[T, layers, top-k]``, or None.
    """

    ids: Int64Array
    row: Int64Array
    start: Int64Array
    length: Int64Array
    routes: npt.NDArray[np.integer] | None = None

    @property
    def size(self) -> int:
        """Number of tokens, T."""
        return len(self.ids)

    @property
    def logical_tokens(self) -> int:
        """Number of tokens of all rows, L."""
        return int(self.length.sum())

    @property
    def unique_tokens(self) -> int:
        """Number of tokens of the rows' layout, before padding. It costs a sort of the rows, not a layout."""
        _, shared = self._sorted
        return self.logical_tokens - int(shared.sum())

    @property
    def fold_ratio(self) -> float:
        """Ratio of all rows' tokens to unique tokens; 1 for no tokens."""
        return self.logical_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @cached_property
    def position(self) -> Int64Array:
        """Positions of the rows' tokens in the trainer's layout, row after row, int64 ``[L]``."""
        before = np.cumsum(self.length) - self.length
        position: Int64Array = np.arange(self.logical_tokens) + np.repeat(self.start - before, self.length)
        return position

    @cached_property
    def _tokens(self) -> list[Int64Array]:
        ends = self.start + self.length
        return [self.ids[start:end] for start, end in zip(self.start.tolist(), ends.tolist(), strict=True)]

    @cached_property
    def _samples(self) -> list[Sample]:
        """The rows as samples; raises ValueError, with the row, for a bad id or route."""
        routes: list[Any] = [None] * len(self.row)
        if self.routes is not None:
            routes = [self.routes[at : at + length] for at, length in zip(self.start, self.length, strict=True)]
        return [
            Sample(tokens=tokens, routed_experts=experts, source=f"row {row}")
            for row, tokens, experts in zip(self.row.tolist(), self._tokens, routes, strict=True)
        ]

    @cached_property
    def _sorted(self) -> tuple[Int64Array, Int64Array]:
        """``order`` and ``shared`` of the rows' trie, as from :func:`sort_samples`, but without making samples."""
        if self.routes is not None:
            return sort_samples(self._samples)
        packed = self.ids.astype(">i4").tobytes()  # such bytes compare like the ids
        spans = zip((4 * self.start).tolist(), (4 * (self.start + self.length)).tolist(), strict=True)
        keys = [packed[start:end] for start, end in spans]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = np.zeros(len(order), dtype=np.int64)
        for at, (left, right) in enumerate(pairwise(order), start=1):
            if keys[left][:4] == keys[right][:4]:
                shared[at] = common_prefix_length(self._tokens[left], self._tokens[right])
        return np.array(order, dtype=np.int64), shared

    def make_layout(self, *, pad_to_multiple_of: int = 1) -> FlatLayout:
        """Fold the rows as :func:`mcore_prefix_tree.layout.fold`; raise ValueError, with the row, for a bad id."""
        samples = self._samples
        order, shared = self._sorted
        trie = trie_from_order(order, shared, self.length[order])
        return fold(samples, trie=trie, pad_to_multiple_of=pad_to_multiple_of)

    def places_in(self, layout: FlatLayout) -> Int64Array:
        """Return the token of the layout that answers for each token, int64 ``[T]``; its padded size for padding."""
        place = np.full(self.size, layout.padded_size)
        place[self.position] = layout.sample_map
        return place

    def sources_in(self, layout: FlatLayout) -> Int64Array:
        """Return a token of the rows for each of the layout, int64 ``[P]``; any for its padding."""
        source = np.zeros(layout.padded_size, dtype=np.int64)
        source[layout.sample_map] = self.position
        return source

    def from_first(self, positions: npt.NDArray[np.integer]) -> Int64Array:
        """Return positions ``[n, T]`` minus those of each row's first token."""
        shifted = positions.astype(np.int64)
        shifted[:, self.position] -= np.repeat(shifted[:, self.start], self.length, axis=1)
        return shifted

    def compared_by(self: Rows, *values: Int64Array) -> Rows:
        """Return rows whose ids, int64 ``[T]``, are equal only where the ids and each of ``values`` ``[T]`` agree."""
        at, numbers = self.position, np.zeros(self.size, dtype=np.int64)
        for value in (self.ids, *values):
            low = value[at].min(initial=0)
            numbers[at] = numbers[at] * (value[at].max(initial=0) - low + 1) + value[at] - low
            numbers[at] = np.unique(numbers[at], return_inverse=True)[1]
        return replace(self, ids=numbers)
