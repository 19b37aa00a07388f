"""Run Megatron's pipeline schedule over micro-batches, folded or stock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_prefix_tree.errors import naming_memory
from mcore_prefix_tree.mcore.engine.backend import cases_of
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import ForwardStep, tree_forward, with_rows
from mcore_prefix_tree.mcore.readout import Readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, WaitingMicroBatch
from mcore_prefix_tree.mcore.trainer.session import Session
from mcore_prefix_tree.objectives import Objective, Targets
from mcore_prefix_tree.plan import CostModel, ModelWork
from mcore_prefix_tree.recipe import Recipe
from mcore_prefix_tree.sample import Sample

T = TypeVar("T")


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    forward_step: ForwardStep,
    *,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
) -> list[Any]:
    """Forward and backward of all micro-batches of this rank.

    Args:
        chunks: of the model.
        micro_batches: what the data iterator of each chunk yields. Folded ones wait on the host until the first chunk
            asks for them, and leave the device when their backward is done.
        forward_step: as Megatron's schedules call it.
        forward_only: no backward.
        collect_non_loss_data: call the loss function with ``non_loss_data=True`` and return what it returns.

    Returns:
        What the loss function reported of each, on the last pipeline stage; nothing elsewhere.
    """
    device = next(chunks[0].parameters()).device
    waiting = [
        WaitingMicroBatch(batch, device, chunks=len(chunks)) if isinstance(batch, MicroBatch) else batch
        for batch in micro_batches
    ]
    iterators = [_taken(waiting) for _ in chunks]
    with naming_memory(lambda: _needed(micro_batches, forward_only=forward_only)):
        reported: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(micro_batches),
            seq_length=1,  # stages exchange the length of each micro-batch: the config has variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
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
) -> list[T]:
    """Return what ``read`` makes of the answer to a readout for each micro-batch; nothing before the last stage."""

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., T]]:
        batch = next(data_iterator)

        def collect(output: torch.Tensor, *, non_loss_data: bool) -> T:
            assert non_loss_data
            return read(output, batch)

        return tree_forward(model, batch, readout), collect

    with torch.no_grad():
        return run_schedule(chunks, batches, forward_step, forward_only=True, collect_non_loss_data=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedStep:
    """One rank's part of a step.

    Attributes:
        sample_index: for each micro-batch, the indices of its samples in the step's list.
        micro_batches: on the host, with the plans of the layers' attention.
        metrics: what the objective knows before the step runs, as (sum, weight); the same on every rank.
    """

    sample_index: tuple[tuple[int, ...], ...]
    micro_batches: list[MicroBatch]
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def work_of(recipe: Recipe) -> ModelWork:
    """Return the FLOPs of the recipe's model.

    Raises:
        ValueError: ``model.vocab_size`` is not known.
    """
    return ModelWork.from_model(
        recipe.model, fused_head=recipe.fused_head, scalar_head=recipe.objective.has_scalar_head
    )


def folding_of(recipe: Recipe, place: Session) -> Folding:
    """How the job folds: its ranks are balanced by what the recipe's model costs.

    Raises:
        ValueError: ``model.vocab_size`` is not known, which the cost depends on.
        RecipeError: the length buckets fit neither the budget nor the parallel layout.
    """
    cost_model = CostModel.from_work(work_of(recipe))
    if place.measured:
        cost_model = cost_model.calibrated(place.measured)
    return Folding(
        max_tokens=recipe.batch.max_tokens,
        dp_size=place.dp_size,
        cost_model=cost_model,
        device=place.device,
        micro_batch_multiple=recipe.parallel.micro_batch_multiple,
        bubble=recipe.parallel.bubble,
        sharing=recipe.batch.sharing,
        padding=recipe.padding,
        attention_backend=recipe.attention_backend,
        attention_cases=cases_of(place.config, device=place.device, deterministic=recipe.deterministic_attention),
        deterministic_attention=recipe.deterministic_attention,
        only_supervised=recipe.fused_head,
        head_chunk_rows=recipe.head_chunk_rows,
    )


def plan_folded(samples: Sequence[Sample], objective: Objective, folding: Folding, place: Session) -> FoldedStep:
    """Plan a step, and fold this data-parallel rank's micro-batches. All stages and tensor-parallel ranks agree on it.

    Raises:
        BudgetError: one sample alone is longer than ``batch.max_tokens``, or the two of a pair are.
        SampleError: a sample lacks what the objective reads.
    """
    with naming_memory(
        lambda: (
            f"planning a step of {len(samples):,} samples, {sum(map(len, samples)):,} tokens, does not fit; "
            "take fewer samples a step"
        )
    ):
        targets = targets_of(objective, samples)
        mine = folding.plan(samples, together=objective.together(samples)).micro_batches[place.dp_rank]
        return FoldedStep(
            sample_index=mine,
            micro_batches=fold_micro_batches(samples, mine, folding, objective, targets),
            metrics={} if targets is None else targets.metrics,
        )


def targets_of(objective: Objective, samples: Sequence[Sample]) -> Targets | None:
    """What the losses of a step read; None for a weighted sum, whose weights the layouts have.

    Raises:
        SampleError: a sample lacks what the objective reads.
    """
    return None if objective.is_weighted_sum else objective.targets(samples)


def fold_micro_batches(
    samples: Sequence[Sample],
    cut: Sequence[Sequence[int]],
    folding: Folding,
    objective: Objective,
    targets: Targets | None,
) -> list[MicroBatch]:
    """Fold micro-batches, and give them what the objective's loss reads.

    Args:
        samples: of the whole step.
        cut: for each micro-batch, the indices of its samples.
        folding: of the job.
        objective: of the step.
        targets: of the step, from :func:`targets_of`.
    """
    batches = [folding.micro_batch([samples[index] for index in indices]) for indices in cut]
    if targets is None:
        return batches
    return [with_rows(batch, objective, targets, indices) for batch, indices in zip(batches, cut, strict=True)]
