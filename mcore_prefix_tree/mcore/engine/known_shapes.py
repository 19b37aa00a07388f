"""Tell pipeline stages the shapes that they would otherwise ask each other for.

With ``variable_seq_lengths``, a stage receives a shape before each tensor, and waits for the device to read it. Every
stage has planned the same micro-batches, so it knows their lengths; Megatron's schedules take a communicator, and so
does the loop of Megatron-LM since core_v0.19. In that loop it is also the place for work before a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):  # type: ignore[misc]
    """Megatron's communicator, which knows the shapes ``(length, batch, hidden)`` of what arrives, in order.

    Args:
        outputs: shapes of the outputs that the stage before sends.
        grads: shapes of the gradients that the stage behind sends.
    """

    def __init__(self, pp_group: Any, config: Any, outputs: Iterable[Shape], grads: Iterable[Shape]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        self._outputs, self._grads = iter(outputs), iter(grads)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        return next(self._outputs) if recv_prev else None, next(self._grads) if recv_next else None


class LoopSteps(Protocol):
    """Steps of a loop; both methods are about the one that the loop is in."""

    def begin_step(self, student: Sequence[torch.nn.Module]) -> None:
        """Run the work before the step, unless it has run; ``student`` has the model chunks of this rank."""

    def list_sizes(self) -> Sequence[torch.Size]:
        """Return ``[batch, length]`` of each micro-batch."""


class LoopCommunicator(KnownShapes):
    """A :class:`KnownShapes` for a loop that takes one for all its steps, before there are process groups."""

    def __init__(self, steps: LoopSteps) -> None:
        self._steps, self._student = steps, list[torch.nn.Module]()

    def join(self, chunk: Any) -> None:
        """Take a model chunk of this rank, all before the first step; the first brings config and process groups."""
        if not self._student:
            group = parallel_state.get_pipeline_model_parallel_group()
            super().__init__(group, chunk.config, *(self._shapes(direction) for direction in (0, 1)))
        # The loop wraps it later; of its wrappers none changes a forward pass whose scores are read in fp32 or better.
        self._student.append(chunk)

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Begin the step, and receive as upstream does.

        In training and in evaluation, all schedules call this on each stage before a stage waits for another. The
        data iterator is read behind it; and the config's ``no_sync_func``, which schedules enter before, is taken by
        ``--overlap-grad-reduce``.
        """
        self._steps.begin_step(self._student)
        return super().recv_forward(tensor_shapes, is_first_stage)

    def _shapes(self, direction: int) -> Iterator[Shape]:
        # A step receives all its shapes, so the first that is left to ask for belongs to the next one.
        while True:
            yield from _arriving(self.config, len(self._student), self._steps.list_sizes())[direction]


class LateGroups(ProcessGroupCollection):  # type: ignore[misc]
    """Process groups of ``parallel_state`` for a loop that takes a collection before it makes them."""

    def __getattr__(self, name: str) -> Any:
        if "tp" not in vars(self) and parallel_state.model_parallel_is_initialized():
            self.__dict__.update(vars(ProcessGroupCollection.use_mpu_process_groups()))
            return getattr(self, name)
        return super().__getattr__(name)


def give_shapes(config: Any, chunks: int, sizes: Sequence[torch.Size]) -> dict[str, Any]:
    """Return arguments of Megatron's schedules, for several pipeline stages, that spare them the exchange of shapes.

    Args:
        chunks: virtual stages of this rank.
        sizes: ``[batch, length]`` of each micro-batch's token ids.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    return {
        "p2p_communicator": KnownShapes(group, config, *_arriving(config, chunks, sizes)),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }


def _arriving(config: Any, chunks: int, sizes: Sequence[torch.Size]) -> tuple[list[Shape], list[Shape]]:
    """Return the shapes of the outputs and of the gradients that this rank receives in a step, in order."""
    group = parallel_state.get_pipeline_model_parallel_group()
    first, last = group.rank() == 0, group.rank() == group.size() - 1
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [(length // ranks, batch, config.hidden_size) for batch, length in sizes]
    order = [(index, 0) for index in range(len(sizes))]
    if chunks > 1:
        order = get_schedule_table(len(sizes), chunks, config.microbatch_group_size_per_vp_stage)
    # The table counts chunks in the order in which they run: from the last one in the backward pass.
    outputs, grads = (
        [shapes[index] for index, chunk in order if chunk or not at_the_end] for at_the_end in (first, last)
    )
    return outputs, grads
