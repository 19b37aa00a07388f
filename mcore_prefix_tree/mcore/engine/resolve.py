"""Resolution of settings into a job: once, whichever door gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_prefix_tree.mcore.engine.backend import attention_cases_of_model, resolve_backend
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import CostModel, Measured, ModelWork
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import Recipe


@dataclass(frozen=True, kw_only=True)
class Run:
    """Ranks and model that a door adds to its settings; without ``measured``, costs are FLOPs."""

    device: torch.device
    dp_size: int
    work: ModelWork
    micro_batch_multiple: int
    measured: tuple[Measured, ...] = ()


def make_folding(recipe: Recipe, run: Run) -> Folding:
    """Return a job's folding, back-end open; raise RecipeError if length buckets do not fit the budget or layout."""
    cost_model = CostModel.from_work(run.work)
    return Folding(
        max_tokens=recipe.batch.max_tokens,
        dp_size=run.dp_size,
        cost_model=cost_model.calibrated(run.measured) if run.measured else cost_model,
        device=run.device,
        micro_batch_multiple=run.micro_batch_multiple,
        bubble=recipe.parallel.bubble,
        sharing=recipe.batch.sharing,
        padding=recipe.padding,
        attention_backend=recipe.attention_backend,
        deterministic_attention=recipe.deterministic_attention,
        only_supervised=recipe.fused_head,
        head_chunk_rows=recipe.head_chunk_rows,
    )


def make_job(
    recipe: Recipe,
    run: Run,
    objective: Objective,
    config: Any,
    first_step: Callable[[], Sequence[Sample]],
    *,
    say: Callable[[str], None],
) -> Job:
    """Return the job that settings describe, the same on every rank and after a restart.

    Args:
        config: megatron-core's ``TransformerConfig`` of the model.
        first_step: function that returns the samples of the first step; ``attention_backend=auto`` looks at them.
        say: function that receives the choice of ``auto``, and its reason.

    Raises:
        RecipeError: see :func:`make_folding`.
        ValueError: the back-end does not support the run; the message names those that do.
    """
    folding, deterministic = make_folding(recipe, run), recipe.deterministic_attention
    backend = resolve_backend(
        recipe.attention_backend, config, first_step, device=run.device, deterministic=deterministic, say=say
    )
    cases = attention_cases_of_model(config, device=run.device, deterministic=deterministic)
    return Job(
        objective=objective,
        folding=replace(folding, attention_backend=backend, attention_cases=cases, config=config),
        dp_rank=parallel_state.get_data_parallel_rank(),
        config=config,
        work=run.work,
        is_local=recipe.model.transformer_impl == "local",
        fused_head=recipe.fused_head,
    )
