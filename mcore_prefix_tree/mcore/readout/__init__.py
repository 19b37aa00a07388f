"""Readouts of the last pipeline stage: a class each, with its request, its packing and its unpacking."""

from __future__ import annotations

from typing import cast

from mcore_prefix_tree.mcore.readout.base import Logits, Readout, SampleScores
from mcore_prefix_tree.mcore.readout.chunks import ChunkLosses
from mcore_prefix_tree.mcore.readout.edge_loss import EdgeLoss
from mcore_prefix_tree.mcore.readout.logprobs import Logprobs, Scores
from mcore_prefix_tree.mcore.readout.teacher import DivergenceLoss, Hidden
from mcore_prefix_tree.mcore.readout.top import ExportedRows, TopLogprobs, TopTokens
from mcore_prefix_tree.mcore.readout.values import SampleValues, ValueLoss, Values
from mcore_prefix_tree.mcore.readout.weighted_sum import WeightedSum
from mcore_prefix_tree.objectives import BoundCrossTokenizer, Distillation, LossOutput, Objective

__all__ = [
    "ChunkLosses",
    "DivergenceLoss",
    "EdgeLoss",
    "ExportedRows",
    "Hidden",
    "Logits",
    "Logprobs",
    "Readout",
    "SampleScores",
    "SampleValues",
    "Scores",
    "TopLogprobs",
    "TopTokens",
    "ValueLoss",
    "Values",
    "WeightedSum",
    "readout_of",
]


def readout_of(objective: Objective, *, fused_head: bool) -> Readout[LossOutput]:
    """Return the readout of training with an objective; without ``fused_head`` it keeps the logits of all tokens."""
    if objective.has_scalar_head:
        return ValueLoss(objective=objective)
    if objective.is_weighted_sum:
        return WeightedSum(fused=fused_head)
    if objective.across_tokenizers:
        return ChunkLosses(objective=cast("BoundCrossTokenizer", objective))
    if objective.asks_model:
        return DivergenceLoss(objective=cast("Distillation", objective))
    return EdgeLoss(objective=objective, fused=fused_head)
