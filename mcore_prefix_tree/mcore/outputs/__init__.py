"""Readouts of the last pipeline stage: a class each, with its request, its packing and its unpacking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcore_prefix_tree.mcore.outputs.distillation import ChunkLosses, DivergenceLoss, Hidden, TeacherHidden
from mcore_prefix_tree.mcore.outputs.edge_loss import EdgeLoss, WeightedSum
from mcore_prefix_tree.mcore.outputs.logprobs import ExportedRows, Logprobs, Scores, TopLogprobs, TopTokens
from mcore_prefix_tree.mcore.outputs.readout import Logits, Readout, SampleScores
from mcore_prefix_tree.mcore.outputs.values import SampleValues, ValueLoss, Values
from mcore_prefix_tree.objectives import LossOutput, Objective
from mcore_prefix_tree.objectives.objective import Output

# The readout of each output that an objective names, from the objective and whether the head is fused.
READOUTS: Mapping[Output, Callable[[Any, bool], Readout[LossOutput]]] = {
    "weighted_sum": lambda _, fused: WeightedSum(fused=fused),
    "logprobs": lambda objective, fused: EdgeLoss(objective=objective, fused=fused),
    "values": lambda objective, _: ValueLoss(objective=objective),
    "divergences": lambda objective, _: DivergenceLoss(objective=objective),
    "chunks": lambda objective, _: ChunkLosses(objective=objective),
}


def make_readout(objective: Objective, *, fused_head: bool) -> Readout[LossOutput]:
    """Return the readout of training with an objective; without ``fused_head`` it keeps the logits of all tokens."""
    return READOUTS[objective.output](objective, fused_head)
