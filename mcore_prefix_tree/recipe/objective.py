"""A recipe's objective."""

from __future__ import annotations

from typing import cast

from pydantic import ValidationError

from mcore_prefix_tree.objectives import CrossTokenizer, Objective, make_objective, option_faults
from mcore_prefix_tree.recipe.sections import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.recipe.teacher import parallel_of_teachers, teacher_recipes
from mcore_prefix_tree.recipe.xtoken import bound


def settings_of(given: ObjectiveConfig) -> Objective:
    """Return the objective that a recipe names, by its options alone.

    Raises:
        RecipeError: the objective or an option is unknown, or an option is out of range.
    """
    name, options = given.name, given.options
    try:
        return make_objective(name, options)
    except ValidationError as error:
        raise RecipeError("; ".join(option_faults(name, error, "objective.options"))) from None
    except ValueError as error:
        raise RecipeError(f"objective.name: {error}") from None


def objective_of(recipe: Recipe) -> Objective:
    """Return the objective that a recipe names, with what it reads before any model is built.

    Raises:
        RecipeError: see :func:`settings_of`; or the objective reads a second model and the recipe names none, or the
            reverse.
    """
    objective = settings_of(recipe.objective)
    teachers = recipe.objective.teacher_recipes
    if objective.across_tokenizers and not teachers:
        raise RecipeError(
            "objective.name=xtoken learns from a model with another tokenizer; name its recipe with "
            "objective.teacher_recipe"
        )
    if objective.asks_model and not teachers:
        raise RecipeError(
            "objective.options.teacher: full asks a second model in every step; name its recipe with "
            "objective.teacher_recipe, or put the teacher's likeliest tokens into the data and set top_k"
        )
    if (objective.asks_model or objective.across_tokenizers) and not recipe.fused_head:
        setting = "objective.name=xtoken" if objective.across_tokenizers else "objective.options.teacher: full"
        raise RecipeError(
            f"fused_head=false keeps all logits of the student, and {setting} would keep the teacher's too; leave "
            "fused_head out"
        )
    if teachers and not objective.asks_model and not objective.across_tokenizers:
        raise RecipeError(
            f"objective.teacher_recipe={', '.join(teachers)}: only objective.name=distill with "
            "objective.options.teacher=full, and xtoken, ask a second model; leave it out"
        )
    if recipe.objective.teacher_tensor_model_parallel_size and not (
        objective.across_tokenizers and objective.asks_model
    ):
        raise RecipeError(
            "objective.teacher_tensor_model_parallel_size is of the teachers that objective.name=xtoken asks in every "
            "step; leave it out"
        )
    parallel_of_teachers(recipe.objective, recipe.parallel)
    if objective.across_tokenizers:
        return bound(
            cast("CrossTokenizer", objective),
            teacher_recipes(recipe),
            recipe.data,
            sharing=recipe.batch.sharing,
            pad_to_multiple_of=recipe.padding.multiple,
            block_rows=recipe.head_chunk_rows,
        )
    if len(teachers) > 1:
        raise RecipeError(f"objective.teacher_recipe names {len(teachers)} recipes, but distill has one teacher")
    return objective
