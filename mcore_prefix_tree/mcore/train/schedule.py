"""Run Megatron's pipeline schedule over micro-batches, folded or stock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.train.session import Session
from mcore_prefix_tree.plan import plan_step
from mcore_prefix_tree.recipe import Recipe
from mcore_prefix_tree.sample import Sample

ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[..., Any]]]


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    forward_step: ForwardStep,
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Forward and backward of all micro-batches of this rank.

    Returns:
        What the loss function reported of each, on the last pipeline stage; nothing elsewhere.
    """
    reported: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks] if len(chunks) > 1 else iter(micro_batches),
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=1,  # stages exchange the length of each micro-batch: the config has variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return reported


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedStep:
    """One rank's part of a step.

    Attributes:
        sample_index: for each micro-batch, the indices of its samples in the step's list.
        micro_batches: on the device.
    """

    sample_index: tuple[tuple[int, ...], ...]
    micro_batches: list[MicroBatch]


def plan_folded(samples: Sequence[Sample], recipe: Recipe, place: Session) -> FoldedStep:
    """Plan a step, and fold this data-parallel rank's micro-batches. All stages and tensor-parallel ranks agree on it.

    Raises:
        BudgetError: one sample alone is longer than ``batch.max_tokens``.
    """
    plan = plan_step(
        samples,
        max_tokens=recipe.batch.max_tokens,
        dp_size=place.dp_size,
        micro_batch_multiple=recipe.parallel.micro_batch_multiple,
    )
    mine = plan.micro_batches[place.dp_rank]
    return FoldedStep(
        sample_index=mine,
        micro_batches=[
            MicroBatch.from_layout(
                fold([samples[index] for index in indices], pad_to_multiple_of=recipe.parallel.sequence_multiple),
                device=place.device,
                attention_backend=recipe.attention_backend,
            )
            for indices in mine
        ],
    )
