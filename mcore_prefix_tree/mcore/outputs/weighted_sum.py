"""The readout of supervised training: the weighted sum of the log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_prefix_tree.logprob import Head, edge_logprobs, head_weighted_sum
from mcore_prefix_tree.mcore.outputs.readout import VocabularyReadout, split_logits
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import LossOutput, sft_loss


@dataclass(frozen=True, kw_only=True)
class WeightedSum(VocabularyReadout[LossOutput]):
    """:func:`sft_loss`, the cheapest loss to train: it is linear, and the micro-batches have its weights."""

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return the sum ``[1, 1]`` from ``hidden`` ``[R, h]`` and ``weight`` ``[V / tp, h]``."""
        assert batch.edges.token is not None, "a weighted sum is of the layout's own tokens"
        total, _ = head_weighted_sum(hidden, weight, head, edge_weight=batch.loss_weight[batch.edges.token])
        return total[None, None]

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of the packed ``[1, 1]``."""
        return LossOutput(loss=-packed.squeeze())

    def _of_logits(self, logits: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of local logits ``[P, V / tp]``."""
        logprob, _ = edge_logprobs(logits, batch.edges, in_place=True, **split_logits(logits, batch))
        return LossOutput(loss=sft_loss(logprob, batch.loss_weight))
