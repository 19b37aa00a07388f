"""Inputs of a loss of one micro-batch: the scored tokens of its samples, one after another, on the device.

A token that several samples score has an entry for each of them, so every value per sample (for example an advantage, a
ratio or a sum over a sequence) is exact, and autograd adds up the gradients where log-probabilities were gathered.

Legend: P padded tokens, M kept edges, K scored tokens, S samples, Q pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.tree_chunks import ChunkLayout
from mcore_prefix_tree.objectives.scored import Float64Array, Int64Array, ScoredTokens
from mcore_prefix_tree.utils.lazy_torch import torch
from mcore_prefix_tree.utils.upload import upload

if TYPE_CHECKING:
    from mcore_prefix_tree.logprob import Edges
    from mcore_prefix_tree.objectives.metrics import LossOutput
    from mcore_prefix_tree.objectives.objective import TokenObjective

FloatColumn = npt.NDArray[np.floating]

# Inputs of each term of a loss: the edges and the entropy of one predictor, all of a sample, or all of a pair's two.
Terms = Literal["row", "sample", "pair"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossRows:
    """Inputs of a loss of one micro-batch."""

    count: int  # the micro-batch's part of the step's divisor
    vocab_size: int | None = None  # V of the model, without padding; the forward step fills it in
    # int64 [m] on the host, ascending: tokens of a chunk's stack, by their places in it, whose hidden states the loss
    # reads; None for a loss that never reads any.
    above: Int64Array | None = None

    def scored(self, edges: Edges) -> Edges:
        """Return the edges that the head scores, from the layout's own."""
        return edges

    def terms_of(self, objective: TokenObjective) -> Terms:
        """Return the group of entries that each term of :meth:`loss_of` reads."""
        return objective.terms

    def loss_of(self, objective: TokenObjective, scores: torch.Tensor, entropy: torch.Tensor | None) -> LossOutput:
        """Return the loss of the micro-batch; arguments as in :meth:`TokenObjective.loss`."""
        return objective.loss(scores, entropy, self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(LossRows):
    """The scored tokens of a micro-batch."""

    # int64 tensor [K], place of the log-probability of each: its flat index, or P + m for kept edge m.
    token: torch.Tensor
    # int64 [K], place of the entropy, or the value, of its prediction: the flat index of the token that predicts it, or
    # P + m.
    predictor: torch.Tensor
    sample: torch.Tensor  # int64 [K], sample of the micro-batch that it belongs to
    weight: torch.Tensor  # float64 [K], weight of its loss; see mcore_prefix_tree.objectives.scored
    lens: torch.Tensor  # float64 [S], scored tokens of each sample
    last: torch.Tensor  # int64 [S], flat index of each sample's last token
    columns: Mapping[str, torch.Tensor]  # [K] each, other values that the objective reads per token, by name
    sample_columns: Mapping[str, torch.Tensor]  # [S] each, values that it reads per sample
    pairs: torch.Tensor  # int64 [Q, 2], the chosen and the rejected sample of each pair
    unit: torch.Tensor  # int64 [K], unit that the token is read with: its sample, or the one that Targets names
    num_units: int  # number of units
    # On the host, int64 [K] each: a scored token's predictor, and the pair or unit that reads it; None if these are the
    # samples.
    read_by_units: tuple[Int64Array, Int64Array] | None = None

    def scored(self, edges: Edges) -> Edges:
        """Return the layout's own edges; those that a pair or unit reads are scored together."""
        return edges if self.read_by_units is None else edges.scored_together(*self.read_by_units)

    @property
    def num_samples(self) -> int:
        return len(self.last)

    def sum_per_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Add up ``[K]`` to ``[S]``."""
        return values.new_zeros(self.num_samples).index_add(0, self.sample, values)

    def sum_of_unit(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``[K]``: the sum over all tokens of each one's unit."""
        return values.new_zeros(self.num_units).index_add(0, self.unit, values)[self.unit]


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """Inputs of a step's losses other than the model's output, made on the host once for all micro-batches."""

    scored: ScoredTokens
    weight: Float64Array  # float64 [K], as in Rows
    count: Int64Array  # int64 [S], each sample's part of the divisor
    columns: Mapping[str, FloatColumn] = field(default_factory=dict)  # [K] each, by name
    sample_columns: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)  # [S] each, by name
    # int64 [K], equal for tokens whose unit the loss reads, for example a rollout; None if it is a sample.
    unit: Int64Array | None = None
    # int64 [Q, 2], indices of samples.
    pairs: Int64Array = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    # Metrics known before the step runs, as (sum, weight).
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    _by_place: MutableMapping[FlatLayout, list[Int64Array]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    @property
    def divisor(self) -> int:
        """Return the divisor of the entire step."""
        return int(self.count.sum())

    def rows(self, layout: FlatLayout, indices: Sequence[int], *, device: torch.device | str = "cpu") -> Rows:
        """Return the part of one micro-batch: ``layout`` has the step's samples at ``indices``, in this order.

        Raises:
            ValueError: the two sides of a pair, or the samples of a unit, are not all in the micro-batch.
        """
        entries, local, token = self._located(layout, indices)
        chosen = np.asarray(indices, dtype=np.int64)
        predictor = _predictors(layout)[token].astype(np.int64)
        pairs, num_units = self._local_pairs(chosen), len(chosen)
        on_device = partial(upload, device=device)
        sample = unit = on_device(local)
        read_by = None
        if len(pairs):
            pair = np.arange(len(chosen))  # of each sample
            pair[pairs[:, 1]] = pairs[:, 0]
            read_by = pair[local]
        if self.unit is not None:
            found, read_by = np.unique(self._whole(self.unit[entries]), return_inverse=True)
            unit, num_units = on_device(read_by), len(found)
        return Rows(
            token=on_device(token),
            predictor=on_device(predictor),
            sample=sample,
            weight=on_device(self.weight[entries]),
            lens=on_device(self.scored.lens[chosen].astype(np.float64)),
            last=on_device(layout.last_tokens),
            columns={name: on_device(values[entries]) for name, values in self.columns.items()},
            sample_columns={name: on_device(values[chosen]) for name, values in self.sample_columns.items()},
            pairs=on_device(pairs),
            unit=unit,
            num_units=num_units,
            count=self.count_in(layout, indices),
            read_by_units=None if read_by is None else (predictor, read_by),
        )

    def count_in(self, layout: FlatLayout, indices: Sequence[int]) -> int:
        """Return a micro-batch's part of the divisor; for arguments see :meth:`rows`."""
        return int(self.count[np.asarray(indices, dtype=np.int64)].sum()) if layout.counts_samples else 0

    def located(self, layout: FlatLayout, indices: Sequence[int]) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return step index, sample here and predictor, int64 ``[K']`` each, of a micro-batch's scored tokens."""
        entries, local, token = self._located(layout, indices)
        return entries, local, _predictors(layout)[token].astype(np.int64)

    def _located(self, layout: FlatLayout, indices: Sequence[int]) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return :meth:`located`, but with the place of each token's score for its predictor."""
        if isinstance(layout, ChunkLayout):
            # The tokens of a tree are sorted by place once; then a chunk's cost is that of its own tokens.
            if layout.whole not in self._by_place:
                of_tree = self._located(layout.whole, indices)
                by_place = np.argsort(of_tree[2], kind="stable")
                self._by_place[layout.whole] = [values[by_place] for values in of_tree]
            entries, local, place = self._by_place[layout.whole]
            found, here = layout.find_scores(place)
            order = np.lexsort((entries[found], local[found]))
            return entries[found][order], local[found][order], here[order]
        assert layout.num_samples == len(indices)
        chosen = np.asarray(indices, dtype=np.int64)
        lens = self.scored.lens[chosen]
        local = np.repeat(np.arange(len(chosen)), lens)
        within = np.arange(len(local)) - (np.cumsum(lens) - lens)[local]
        entries = self.scored.cu_lens[chosen][local] + within
        logical = layout.cu_sample_lens[local] + self.scored.position[entries]
        return entries, local, layout.places[logical].astype(np.int64)

    def _local_pairs(self, chosen: Int64Array) -> Int64Array:
        """Return int64 ``[Q, 2]``, pairs by their places among the samples ``chosen``, int64 ``[S]``."""
        local = np.full(len(self.scored.samples), -1, dtype=np.int64)
        local[chosen] = np.arange(len(chosen))
        here = local[self.pairs]
        split = (here < 0).any(axis=1) & (here >= 0).any(axis=1)
        if split.any():
            one, other = (self.scored.samples[index] for index in self.pairs[np.argmax(split)].tolist())
            raise ValueError(
                f"{one.source} and {other.source} are the two sides of a pair but not in one micro-batch; plan the "
                "step with plan_step(together=...)"
            )
        return here[here[:, 0] >= 0]

    def _whole(self, own: Int64Array) -> Int64Array:
        """Return ``own``, the unit of each token of a micro-batch; raise ValueError if one lacks some of its tokens."""
        here = np.bincount(own, minlength=len(self._unit_sizes))
        is_cut = (here > 0) & (here < self._unit_sizes)
        if is_cut.any():
            of_unit = self.scored.sample[self.unit == np.argmax(is_cut)]
            one, other = (self.scored.samples[index].source for index in of_unit[[0, -1]].tolist())
            raise ValueError(
                f"{one} and {other} are of one rollout but not in one micro-batch; plan the step with "
                "plan_step(together=...)"
            )
        return own

    @cached_property
    def _unit_sizes(self) -> Int64Array:
        assert self.unit is not None
        return np.bincount(self.unit)


def _predictors(layout: FlatLayout) -> Int64Array:
    """Return the place of the prediction at each place, int64 ``[P + M]``: a kept edge's is its own."""
    of_token = layout.edge_predictor
    return np.append(of_token, np.arange(len(of_token), layout.num_places))
