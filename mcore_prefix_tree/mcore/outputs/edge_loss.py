"""The readout of a loss of edges, which forms gradients while it holds a chunk's logits.

Legend: P padded tokens, M kept edges, E edges, R rows (predictors with an edge), D distributions over kept sets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mcore_prefix_tree.logprob import Edges, Head, edge_logprobs, head_edge_loss, head_weighted_sum, split_kept
from mcore_prefix_tree.mcore.outputs.readout import VocabularyReadout, gradient_and_values, split_logits, with_gradient
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import LossOutput, LossRows, TokenObjective, sft_loss


@dataclass(frozen=True, kw_only=True)
class EdgeLoss(VocabularyReadout[LossOutput]):
    """An objective's loss on the log-probabilities, and on entropies if it reads them; micro-batches have its rows."""

    objective: TokenObjective

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return ``[N, 1]``, gradient and values, from ``hidden`` ``[R + D, h]`` and ``weight`` ``[V / tp, h]``."""
        edges, watches = batch.edges, self.objective.reports_entropy
        by_rows = _rows(batch).terms_of(self.objective) == "row"
        hidden, of_kept = split_kept(hidden, weight, head)
        # Known before all others; the loss of :meth:`_unpack` has their gradient.
        known = None if of_kept is None else of_kept.detach()

        def loss(per_edge: torch.Tensor, per_row: torch.Tensor | None) -> torch.Tensor:
            """Return the loss of ``per_edge`` ``[E]`` and ``per_row`` ``[R]``."""
            values = edges.with_kept(known, *_placed(edges, per_edge, per_row))
            return _rows(batch).loss_of(self.objective, *values).loss

        if edges.has_rows:
            gradient, per_edge, per_row = head_edge_loss(
                hidden, weight, head, loss=loss, by_rows=by_rows, with_entropy=watches
            )
            scores, entropy = _placed(edges, per_edge, per_row)
        else:
            assert of_kept is not None
            scores, entropy = edges.no_scores(of_kept.logprob, with_entropy=watches)
            gradient = scores.new_zeros(())
        values = edges.with_kept(of_kept, scores, entropy)
        return with_gradient(gradient, *(part for part in values if part is not None))

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of the packed ``[N, 1]``."""
        gradient, values = gradient_and_values(packed, has_kept=batch.edges.kept is not None)
        scores, entropy = values.chunk(2) if self.objective.reports_entropy else (values, None)
        value = _rows(batch).loss_of(self.objective, scores, entropy)
        return replace(value, loss=value.loss + gradient)

    def _read_logits(self, logits: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of local logits ``[P, V / tp]``."""
        # If the entropies are read, backward cannot overwrite the logits.
        watches = self.objective.reports_entropy
        scores, entropy = edge_logprobs(
            logits, batch.edges, with_entropy=watches, in_place=not watches, **split_logits(logits, batch)
        )
        return _rows(batch).loss_of(self.objective, scores, entropy)


def _rows(batch: MicroBatch) -> LossRows:
    assert batch.rows is not None, "all losses but a weighted sum read them"
    return batch.rows


def _placed(
    edges: Edges, per_edge: torch.Tensor, per_row: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the inputs of a loss: ``[P + M]``, and ``[P + M]`` or None; for a teacher's tokens ``[E]``."""
    return edges.placed(per_edge), None if per_row is None else edges.at_rows(per_row)


@dataclass(frozen=True, kw_only=True)
class WeightedSum(VocabularyReadout[LossOutput]):
    """:func:`sft_loss`, the cheapest loss to train: it is linear, and the micro-batches have its weights."""

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return the sum ``[1, 1]`` from ``hidden`` ``[R + D, h]`` and ``weight`` ``[V / tp, h]``."""
        edges = batch.edges
        assert edges.token is not None, "a weighted sum is of the layout's own tokens"
        hidden, of_kept = split_kept(hidden, weight, head)
        sums = []
        if edges.has_rows:
            sums.append(head_weighted_sum(hidden, weight, head, edge_weight=batch.loss_weight[edges.token])[0])
        if edges.kept is not None and of_kept is not None:
            own_weight = batch.loss_weight[edges.kept.place]
            sums.append(torch.dot(of_kept.logprob, own_weight.to(of_kept.logprob.dtype)))
        return torch.stack(sums).sum()[None, None]

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of the packed ``[1, 1]``."""
        return LossOutput(loss=-packed.squeeze())

    def _read_logits(self, logits: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of local logits ``[P, V / tp]``."""
        logprob, _ = edge_logprobs(logits, batch.edges, in_place=True, **split_logits(logits, batch))
        return LossOutput(loss=sft_loss(logprob, batch.loss_weight))
