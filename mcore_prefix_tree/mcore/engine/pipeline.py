"""Run Megatron's pipeline schedule over micro-batches, folded or stock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.utils import get_model_config

from mcore_prefix_tree.mcore.engine.forward_step import ForwardStep, tree_forward
from mcore_prefix_tree.mcore.engine.known_shapes import give_shapes
from mcore_prefix_tree.mcore.outputs import Readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, WaitingMicroBatch
from mcore_prefix_tree.mcore.seam.validation import check_interleaving
from mcore_prefix_tree.utils.errors import naming_memory

T = TypeVar("T")


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    forward_step: ForwardStep,
    *,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    one_stage: bool = False,
) -> list[Any]:
    """Run forward and backward of all micro-batches; return the last stage's reports of the loss, ``[]`` elsewhere.

    Args:
        micro_batches: micro-batches that the data iterator of each chunk yields. Folded ones wait on the host until the
            first chunk asks for them, and leave the device when their backward is done.
        collect_non_loss_data: whether to call the loss function with ``non_loss_data=True`` and return its results.
        one_stage: whether the model has one pipeline stage, however many ``parallel_state`` has.

    Raises:
        NotImplementedError: see :func:`check_interleaving`.
    """
    config, sizes = get_model_config(chunks[0]), [batch.input_ids.shape for batch in micro_batches]
    if not (forward_only or one_stage):
        check_interleaving(config, [length for _, length in sizes])
    device = next(chunks[0].parameters()).device
    waiting = [
        WaitingMicroBatch(batch, device, chunks=len(chunks)) if isinstance(batch, MicroBatch) else batch
        for batch in micro_batches
    ]
    iterators = [_taken(waiting) for _ in chunks]
    has_others = not one_stage and parallel_state.get_pipeline_model_parallel_world_size() > 1
    with naming_memory(lambda: _needed(micro_batches, forward_only=forward_only)):
        reported: list[Any] = (forward_backward_no_pipelining if one_stage else get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(micro_batches),
            seq_length=1,  # micro-batches differ in length: the config has variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            **(give_shapes(config, len(chunks), sizes) if has_others else {}),
        )
    return reported


def _needed(micro_batches: Sequence[Any], *, forward_only: bool) -> str:
    passes = "forward pass" if forward_only else "forward and backward pass"
    sizes = [batch.layout.padded_size for batch in micro_batches if isinstance(batch, MicroBatch)]
    largest = f" of up to {max(sizes):,} tokens" if sizes else ""
    return f"the {passes} of {len(micro_batches)} micro-batches{largest} does not fit; lower batch.max_tokens"


def _taken(waiting: Sequence[Any]) -> Iterator[Any]:
    for batch in waiting:
        yield batch.take() if isinstance(batch, WaitingMicroBatch) else batch


def forward_only(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    readout: Readout[Any],
    read: Callable[[torch.Tensor, MicroBatch], T],
    *,
    one_stage: bool = False,
) -> list[T]:
    """Return ``read`` of each micro-batch's answer ``[1, P, ...]``; an empty list before the last stage."""

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., T]]:
        batch = next(data_iterator)

        def collect(output: torch.Tensor, *, non_loss_data: bool) -> T:
            """Return ``read`` of the output ``[1, P, ...]``."""
            assert non_loss_data
            return read(output, batch)

        return tree_forward(model, batch, readout), collect

    with torch.no_grad():
        return run_schedule(
            chunks, batches, forward_step, forward_only=True, collect_non_loss_data=True, one_stage=one_stage
        )
