"""A recipe's objective."""

from __future__ import annotations

from typing import cast

from pydantic import ValidationError

from mcore_prefix_tree.objectives import CrossTokenizer, Objective, make_objective, option_faults
from mcore_prefix_tree.recipe.sections import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.recipe.teacher import IN_RECIPES, SettingNames, teacher_recipes
from mcore_prefix_tree.recipe.xtoken import bound


def settings_of(given: ObjectiveConfig, names: SettingNames = IN_RECIPES) -> Objective:
    """Return the objective that a recipe names, by its options alone.

    Args:
        given: objective section of the recipe.
        names: names of the settings, for messages.

    Raises:
        RecipeError: the objective or an option is unknown, or an option is out of range.
    """
    name, options = given.name, given.options
    try:
        return make_objective(name, options)
    except ValidationError as error:
        raise RecipeError("; ".join(option_faults(name, error, names.options))) from None
    except ValueError as error:
        raise RecipeError(f"objective.name: {error}") from None


def check_teachers_named(
    objective: Objective, given: ObjectiveConfig, *, fused_head: bool, names: SettingNames = IN_RECIPES
) -> None:
    """Check that a job names the teachers that its objective reads, and no others.

    Args:
        objective: objective that :func:`settings_of` returned.
        given: objective section of the job's recipe.
        fused_head: whether the student has the fused head.
        names: names of the settings, for messages.

    Raises:
        RecipeError: the named teachers do not fit the objective.
    """
    teachers, across = given.teacher_recipes, objective.across_tokenizers
    full = f"{names.options}.teacher: full"
    if across and not teachers:
        raise RecipeError(
            f"{names.objective.format('xtoken')} learns from a model with another tokenizer; name its recipe with "
            f"{names.teacher}"
        )
    if objective.asks_model and not teachers:
        raise RecipeError(
            f"{full} asks a second model in every step; name its recipe with {names.teacher}, or put the teacher's "
            "likeliest tokens into the data and set top_k"
        )
    if (objective.asks_model or across) and not fused_head:
        setting = names.objective.format("xtoken") if across else full
        raise RecipeError(
            f"{names.no_fused_head} keeps all logits of the student, and {setting} would keep the teacher's too; leave "
            "it out"
        )
    if teachers and not objective.asks_model and not across:
        raise RecipeError(
            f"{names.teacher}={', '.join(teachers)}: only {names.objective.format('distill')} with "
            f"{names.options}.teacher=full, and xtoken, ask a second model; leave it out"
        )
    if given.teacher_tensor_model_parallel_size and not objective.asks_model:
        raise RecipeError(
            f"{names.teacher_tensor_parallel} applies only to teachers that are asked in every step; leave it out"
        )
    if len(teachers) > 1 and not across:
        raise RecipeError(f"{names.teacher} names {len(teachers)} recipes, but distill has one teacher")


def objective_of(recipe: Recipe, names: SettingNames = IN_RECIPES) -> Objective:
    """Return the objective that a recipe names, with what it reads before any model is built.

    Args:
        recipe: recipe of the job.
        names: names of the settings, for messages.

    Raises:
        RecipeError: a tokenizer, a projection or a teacher's recipe does not fit.
    """
    objective = settings_of(recipe.objective, names)
    if not objective.across_tokenizers:
        return objective
    return bound(
        cast("CrossTokenizer", objective),
        teacher_recipes(recipe, names),
        recipe.data,
        sharing=recipe.batch.sharing,
        pad_to_multiple_of=recipe.padding.multiple,
        block_rows=recipe.head_chunk_rows,
        names=names,
    )
