"""Sampling masks on a layout: every different set of ids that a prediction was drawn from, once.

A mask belongs to the edges of its own sample. Samples that share a predictor may have kept different sets there: their
tokens are then scored by different distributions, also if they drew the same token. Equal sets of one predictor are one
distribution, whoever drew from it.

Legend: P padded tokens, L logical tokens, D distributions (a predictor and a set), M kept edges (a distribution and the
token that was drawn), K kept ids of all distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample

if TYPE_CHECKING:
    from mcore_prefix_tree.layout.flat import FlatLayout

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSets:
    """The distributions over kept ids that a layout's samples were drawn from."""

    predictor: Int64Array  # int64 [D], flat index of the token that predicts, ascending
    token_ids: npt.NDArray[np.int32]  # int32 [K], the ids of one distribution after the other, ascending within each
    offsets: Int64Array  # int64 [D + 1], distribution d keeps token_ids[offsets[d]:offsets[d + 1]]
    distribution: Int64Array  # int64 [M], the distribution of each kept edge, ascending
    token: Int64Array  # int64 [M], flat index of the token that was drawn, or in a chunk the place of the token's score
    loss_weight: npt.NDArray[np.float64]  # float64 [M], the loss masks of all samples with this edge, summed
    # float64 [P], the loss masks of all samples through a token that drew it from the whole vocabulary, summed.
    whole_weight: npt.NDArray[np.float64]
    has_whole: npt.NDArray[np.bool_]  # bool [P], whether there is such a sample
    # int32 [L], place of each logical token's score: its flat index, or P + m for kept edge m. Empty in a chunk of a
    # layout.
    place: npt.NDArray[np.int32]

    def __len__(self) -> int:
        """Return M."""
        return len(self.token)

    def edges_of(self, start: int, end: int) -> Int64Array:
        """Return the kept edges that the tokens ``start:end`` predict, int64 ``[n]``."""
        return np.arange(*np.searchsorted(self.predictor[self.distribution], (start, end)))

    def cut(self, start: int, end: int, scored: Int64Array) -> KeptSets:
        """Return the sets of a chunk ``start:end``; ``scored``, int64 ``[n]``, has the token of each score, or -1."""
        first, last = np.searchsorted(self.predictor, (start, end)).tolist()
        edges, offsets, places = self.edges_of(start, end), self.offsets[first : last + 1], np.flatnonzero(scored >= 0)
        return KeptSets(
            predictor=self.predictor[first:last] - start,
            token_ids=self.token_ids[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
            distribution=self.distribution[edges] - first,
            token=places[np.searchsorted(scored[places], self.token[edges])],
            loss_weight=self.loss_weight[edges],
            whole_weight=np.where(scored >= 0, self.whole_weight[scored], 0.0),
            has_whole=(scored >= 0) & self.has_whole[scored],
            place=np.empty(0, dtype=np.int32),
        )


def find_kept_sets(samples: Sequence[Sample], layout: FlatLayout) -> KeptSets:
    """Return the distributions of the samples that a layout holds, in its order; their order makes no difference."""
    masks = [sample.signals.sampling_mask for sample in samples]
    pairs = list(zip(samples, masks, strict=True))
    size = np.concatenate([np.zeros(len(one), np.int64) if mask is None else mask.sizes for one, mask in pairs])
    ids = np.concatenate([mask.token_ids for mask in masks if mask is not None])
    weight = np.concatenate([sample.loss_mask for sample in samples]).astype(np.float64)
    flat = layout.sample_map.astype(np.int64)
    predictor = layout.predictor[flat].astype(np.int64)
    start = np.cumsum(size) - size
    whole = (predictor >= 0) & (size == 0)
    logical = np.flatnonzero((predictor >= 0) & (size > 0))
    start, size, of_token, predictor = start[logical], size[logical], flat[logical], predictor[logical]

    order, is_first = _grouped(predictor, ids, start, size)
    first = order[is_first]
    distribution = np.empty(len(logical), dtype=np.int64)
    distribution[order] = np.cumsum(is_first) - 1
    edge, number = np.unique(distribution * layout.padded_size + of_token, return_inverse=True)
    place = layout.sample_map.copy()
    place[logical] = layout.padded_size + number
    return KeptSets(
        predictor=predictor[first],
        token_ids=ids[spans(start[first], size[first])],
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(size[first])]),
        distribution=edge // layout.padded_size,
        token=edge % layout.padded_size,
        loss_weight=_summed(number, weight[logical], len(edge)),
        whole_weight=_summed(flat[whole], weight[whole], layout.padded_size),
        has_whole=np.bincount(flat[whole], minlength=layout.padded_size) > 0,
        place=place,
    )


def _summed(place: Int64Array, weight: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.float64]:
    """Return the sums ``[size]`` of weights ``[n]`` at places ``[n]``."""
    return np.bincount(place, weights=weight, minlength=size).astype(np.float64)


def _grouped(
    predictor: Int64Array, ids: npt.NDArray[np.int32], start: Int64Array, size: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return an order of n sets by predictor with equal ones side by side, and the first of each; ``[n]`` each."""
    # Set i is ids[start[i]:start[i] + size[i]]. Equal sets have equal digests. Two that differ are told apart even
    # if their digests are equal: then a set may be there twice, which costs time alone.
    total = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(_mixed(ids), dtype=np.uint64)])
    digest = total[start + size] - total[start]
    order = np.lexsort((digest, size, predictor))
    left, right = order[:-1], order[1:]
    same = (predictor[left] == predictor[right]) & (size[left] == size[right]) & (digest[left] == digest[right])
    one, other = left[same], right[same]
    differs = ids[spans(start[one], size[one])] != ids[spans(start[other], size[other])]
    same[same] = np.bincount(np.repeat(np.arange(len(one)), size[one]), weights=differs, minlength=len(one)) == 0
    return order, np.concatenate([np.ones(min(len(order), 1), dtype=np.bool_), ~same])


def _mixed(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each id ``[K]`` whose sums hardly ever agree for different sets."""
    # The finaliser of SplitMix64: Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014, fig. 18.
    bits = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed


def spans(start: Int64Array, size: Int64Array) -> Int64Array:
    """Return the indices of spans ``[n]``, one after the other."""
    before = np.cumsum(size) - size
    indices: Int64Array = np.arange(int(size.sum())) + np.repeat(start - before, size)
    return indices
