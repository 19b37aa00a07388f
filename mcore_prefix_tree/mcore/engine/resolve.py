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
from mcore_prefix_tree.mcore.engine.tree_losses import make_hook
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.objectives.scored import MissingSignalError
from mcore_prefix_tree.plan import CostModel, ModelWork
from mcore_prefix_tree.plan.model_shape import trained_depths
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.settings import Recipe
from mcore_prefix_tree.settings.sample_source import choose_cutting


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings, with the ranks and the model that a door knows.

    ``runs_ahead`` is whether its loop can run a pass before a step.
    """

    settings: Recipe
    device: torch.device
    dp_size: int
    work: ModelWork
    micro_batch_multiple: int
    runs_ahead: bool = True

    def make_folding(self, objective: Objective | None = None) -> Folding:
        """Return the folding, back-end open; without an objective its micro-batches hold whole samples.

        Raises RecipeError if length buckets do not fit the budget or layout, or ``batch.over_budget`` is not possible.
        """
        settings = self.settings
        folding = Folding(
            max_tokens=settings.batch.max_tokens,
            dp_size=self.dp_size,
            cost_model=CostModel.from_work(self.work),
            device=self.device,
            micro_batch_multiple=self.micro_batch_multiple,
            bubble=settings.parallel.bubble,
            sharing=settings.batch.sharing,
            padding=settings.padding,
            attention_backend=settings.attention_backend,
            deterministic_attention=settings.deterministic_attention,
            only_supervised=settings.fused_head,
            head_chunk_rows=settings.head_chunk_rows,
        )
        if objective is None:
            return folding
        cutting = choose_cutting(settings.batch.over_budget, objective, runs_ahead=self.runs_ahead)
        return replace(folding, **cutting._asdict())

    def make_job(
        self,
        objective: Objective,
        config: Any,
        first_step: Callable[[], Sequence[Sample]],
        *,
        say: Callable[[str], None],
    ) -> Job:
        """Return the job, the same on every rank and after a restart.

        Args:
            config: megatron-core's ``TransformerConfig`` of the model.
            first_step: function that returns the samples of the first step; ``attention_backend=auto`` looks at them.
            say: function that receives the choice of ``auto``, and its reason.

        Raises:
            RecipeError: see :meth:`make_folding`.
            ValueError: the back-end does not support the run; the message names those that do.
        """
        settings, device = self.settings, self.device
        folding, deterministic = self.make_folding(objective), settings.deterministic_attention
        backend = resolve_backend(
            settings.attention_backend, config, first_step, device=device, deterministic=deterministic, say=say
        )
        cases = attention_cases_of_model(config, device=device, deterministic=deterministic)
        folding = replace(
            folding,
            attention_backend=backend,
            attention_cases=cases,
            config=config,
            depths=trained_depths(vars(config)),
        )
        return Job(
            objective=objective,
            folding=folding,
            dp_rank=parallel_state.get_data_parallel_rank(),
            config=config,
            work=self.work,
            is_local=settings.model.transformer_impl == "local",
            fused_head=settings.fused_head,
            hook=make_hook(objective, folding),
        )


# The commands that write the fields that samples may lack.
_WRITERS = {
    "old_logprobs": "`mcore-prefix-tree score` with the checkpoints that the samples were drawn from writes it",
    "ref_logprobs": "`mcore-prefix-tree score --reference FOLDER` writes it",
    "values": "`mcore-prefix-tree score` of a critic writes it",
    "reward": "`mcore-prefix-tree score` of a reward model writes one",
    "teacher": "`mcore-prefix-tree score --teacher-top-k K` of the teacher writes it",
}


def check_samples(objective: Objective, samples: Sequence[Sample]) -> None:
    """Check before the first step that the objective can train on complete groups, rollouts or pairs.

    Raises:
        SampleError: a sample lacks a field that the objective reads, or contradicts the others of its group. Names the
            command or setting that adds the missing field, if any.
    """
    try:
        objective.check(samples)
    except MissingSignalError as error:
        ways_out = [table[error.field] for table in (_WRITERS, objective.remedies) if error.field in table]
        if not ways_out:
            raise
        raise SampleError(f"{error}; {', or '.join(ways_out)}") from None
