"""A resolved training job: everything that its steps need, whoever described it; and its step hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import ForwardStep, forward_step
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.outputs import Readout, make_readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import LossOutput, Objective
from mcore_prefix_tree.plan import Carrying, ModelWork

# A pass over micro-batches without gradients, which returns the reports of their losses.
Forward = Callable[[Sequence[MicroBatch]], Sequence[Mapping[str, Any]]]


class StepHook:
    """Work that an objective needs before each step, for example a run of its teachers; this one does nothing.

    It keeps its results in ``hook_data`` of the micro-batches, which the readout of the objective reads.
    """

    def prepare(self, batches: Sequence[MicroBatch], carrying: Carrying | None = None) -> Sequence[MicroBatch]:
        """Return micro-batches with the inputs of :meth:`before_step`, made on the host while another step computes.

        ``carrying`` says which of them are parts of trees.
        """
        return batches

    def before_step(self, batches: Sequence[MicroBatch], student: Forward) -> Sequence[MicroBatch]:
        """Return the micro-batches with the results, on the last stage; all ranks call it together.

        ``student`` is its forward pass, for losses that weigh their parts by results of the entire step.
        """
        return batches


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Everything a step needs, resolved and checked before the first one.

    A recipe makes a job, and so do Megatron-LM's arguments. Functions that take a job read neither.
    """

    objective: Objective
    folding: Folding
    dp_rank: int  # index of this rank's part of a plan
    config: Any  # megatron-core's TransformerConfig of the model
    work: ModelWork  # FLOPs of the model
    is_local: bool = True  # whether the stock model's layers are megatron-core's own, not TransformerEngine's
    # Whether the output layer scores a chunk of logits at a time; False keeps the logits of all tokens.
    fused_head: bool = True
    hook: StepHook = field(default_factory=StepHook)
    # See divided_by_tokens; by default, whether the model's layers may add losses.
    divides_by_tokens: bool | None = None
    # Readout of the last pipeline stage; follows from the objective and fused_head.
    readout: Readout[LossOutput] = field(init=False)
    # Forward step that Megatron's schedules call; follows from the readout.
    forward_step: ForwardStep = field(init=False)

    def __post_init__(self) -> None:
        if self.divides_by_tokens is None and self.config is not None:
            adds = self.config.num_moe_experts is not None or self.config.experimental_attention_variant == "dsa"
            object.__setattr__(self, "divides_by_tokens", adds)
        readout = make_readout(self.objective, fused_head=self.fused_head)
        object.__setattr__(self, "readout", readout)
        object.__setattr__(self, "forward_step", partial(forward_step, readout=readout))

    def forward(self, student: Sequence[torch.nn.Module]) -> Forward:
        """Return the forward pass of the student over micro-batches, by Megatron's schedule."""
        return partial(run_schedule, student, forward_step=self.forward_step, forward_only=True)
