"""The step hook of a job: the work of an objective between folding and the student's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.plan import Carrying

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
