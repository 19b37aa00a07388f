"""The order in which a recipe's steps take samples, and the units that they keep whole."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.recipe.objective import objective_of
from mcore_prefix_tree.recipe.sections import Recipe, RecipeError
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import GroupedBy


def order_of(recipe: Recipe, lines: Sequence[Sequence[Sample]]) -> SampleOrder:
    """Return the order in which training with a recipe takes samples.

    Args:
        recipe: the job's; ``data.path`` is not read.
        lines: the samples of each line, in memory.

    Raises:
        SampleError, RecipeError: the samples do not form groups, or are too few for a step.
    """
    by = grouped_by(recipe, objective_of(recipe))
    groups = joined(recipe, lines, by, step=recipe.batch.global_batch_size)
    return order_of_groups(recipe, groups, whole_steps=by is not None)


def order_of_groups(recipe: Recipe, groups: Sequence[Sequence[Sample]], *, whole_steps: bool) -> SampleOrder:
    """Return the order of lines, or of the units that steps take whole.

    Raises:
        RecipeError: there are too few for a step.
    """
    try:
        return SampleOrder(
            groups,
            seed=recipe.seed,
            order=recipe.data.order,
            by_line=recipe.batch.groups_per_step is not None,
            step=recipe.batch.per_step,
            whole_steps=whole_steps,
        )
    except ValueError as error:
        raise RecipeError(str(error)) from None


def joined(
    recipe: Recipe, lines: Sequence[Sequence[Sample]], by: GroupedBy | None, *, step: int | None
) -> Sequence[Sequence[Sample]]:
    """Return the samples of each line, or of each unit that a step takes whole."""
    if by is None:
        return lines
    return whole_groups(lines, by, step=step, setting=f"objective.name={recipe.objective.name}")


def grouped_by(recipe: Recipe, objective: Objective) -> GroupedBy | None:
    """Return the units that the objective needs whole, or None for samples.

    Raises:
        RecipeError: steps count groups, and the objective has none.
    """
    by = objective.grouped_by
    if by is None and recipe.batch.groups_per_step is not None:
        raise RecipeError(
            f"batch.groups_per_step={recipe.batch.groups_per_step}: objective.name={recipe.objective.name} as it is "
            "set takes each sample by itself; set batch.global_batch_size instead"
        )
    return by
