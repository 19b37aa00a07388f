"""Samples that nothing learns from: what the recipe's objective says of them now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from mcore_prefix_tree.data.folded import trie_order
from mcore_prefix_tree.mcore.engine.forward_step import forward_step_of
from mcore_prefix_tree.mcore.engine.schedule import fold_micro_batches, folding_of, run_schedule, targets_of
from mcore_prefix_tree.mcore.engine.totals import Totals, check_finite
from mcore_prefix_tree.mcore.trainer.session import Session
from mcore_prefix_tree.mcore.trainer.teacher import TeacherModel
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.recipe import Recipe
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the weights make of the samples that were held out.

    Attributes:
        iteration: steps behind the weights; 0 before the first.
        loss: of the recipe's objective, as of a step that takes all these samples.
        samples: how many there are.
        logical_tokens: of these.
        physical_tokens: computed, over all ranks, without padding.
        seconds: folding and forward.
        metrics: means that the objective reports, over all samples.
    """

    iteration: int
    loss: float
    samples: int
    logical_tokens: int
    physical_tokens: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class HeldOut:
    """The samples of ``validation.path``, planned once.

    About as many are computed together as in a step, so that an evaluation needs no more memory than training; what
    their losses read is of all of them, as of one step. With ``data.order: folded`` neighbours in the trie are computed
    together.

    Args:
        groups: samples that belong together: those of a line, of a group or of a pair.
        recipe: the job's.
        objective: the recipe's.
        place: this rank's.

    Raises:
        BudgetError: as of :func:`plan_folded`.
        SampleError: as of :func:`targets_of`.
    """

    def __init__(
        self, groups: Sequence[Sequence[Sample]], recipe: Recipe, objective: Objective, place: Session
    ) -> None:
        self._place = place
        self._objective, self._folding = objective, folding_of(recipe, place)
        self._forward_step = forward_step_of(objective, fused_head=recipe.fused_head)
        if recipe.data.order == "folded":
            groups = [groups[unit] for unit in trie_order(groups).tolist()]
        self._samples = list(chain.from_iterable(groups))
        self._targets = targets_of(objective, self._samples)
        self._totals = Totals(place, has_metrics=self._targets is not None)
        # Of each part this rank's micro-batches, as indices into all samples.
        self._parts = []
        for part in _parts(groups, recipe):
            own = self._samples[part.start : part.stop]
            mine = self._folding.plan(own, together=objective.together(own)).micro_batches[place.dp_rank]
            self._parts.append([tuple(part.start + index for index in indices) for indices in mine])

    def evaluate(
        self, chunks: Sequence[torch.nn.Module], iteration: int, *, teacher: TeacherModel | None = None
    ) -> Evaluation:
        """All ranks together; weights and gradients stay as they are.

        Args:
            chunks: of the model.
            iteration: steps behind its weights.
            teacher: the second model of an objective that has one.

        Raises:
            SampleError: an output of the model is NaN or infinite; names the sample. Supervised training, which looks
                at no sample by itself, has a loss that is not finite instead.
        """
        started = time.perf_counter()
        reported, physical = [], 0
        for cut in self._parts:
            folded = fold_micro_batches(self._samples, cut, self._folding, self._objective, self._targets)
            physical += sum(batch.layout.physical_tokens for batch in folded)
            if teacher is not None:
                folded = teacher.teach(folded)
            with torch.no_grad():
                reported += run_schedule(chunks, folded, self._forward_step, forward_only=True)
        if not self._objective.is_weighted_sum:
            check_finite(reported, list(chain.from_iterable(self._parts)), self._samples, self._place)
        known = {} if self._targets is None else self._targets.metrics
        loss, physical, metrics = self._totals.of(reported, physical_tokens=physical, known=known)
        return Evaluation(
            iteration=iteration,
            loss=loss,
            samples=len(self._samples),
            logical_tokens=sum(map(len, self._samples)),
            physical_tokens=physical,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )


def _parts(groups: Sequence[Sequence[Sample]], recipe: Recipe) -> Iterator[range]:
    """Whole groups, as many as a step takes or as have as many samples: the indices of each part's samples."""
    start = stop = taken = 0
    for group in groups:
        stop += len(group)
        taken += 1 if recipe.batch.groups_per_step is not None else len(group)
        if taken >= recipe.batch.per_step:
            yield range(start, stop)
            start, taken = stop, 0
    if stop > start:
        yield range(start, stop)
