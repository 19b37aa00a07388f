"""A recipe's objective."""

from __future__ import annotations

from pydantic import ValidationError

from mcore_prefix_tree.objectives import CrossTokenizer, Objective, make_objective, option_faults
from mcore_prefix_tree.settings.bind_xtoken import bind
from mcore_prefix_tree.settings.sections import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.settings.teachers import teacher_recipes


def make_settings(given: ObjectiveConfig) -> Objective:
    """Return the objective of a section's name and options; raises RecipeError if one is unknown or out of range."""
    name, options = given.name, given.options
    try:
        return make_objective(name, options)
    except ValidationError as error:
        raise RecipeError("; ".join(option_faults(name, error, "objective.options"))) from None
    except ValueError as error:
        raise RecipeError(f"objective.name: {error}") from None


def check_teachers_named(objective: Objective, given: ObjectiveConfig, *, fused_head: bool) -> None:
    """Raise RecipeError, which names every mistake, unless a job names the teachers that its objective reads."""
    teachers, needed = given.teacher_recipes, objective.second_models
    asked, across = needed is not None and needed.asked, needed is not None and not needed.same_vocabulary
    full = "objective.options.teacher: full"
    faults = []
    if across and not teachers:
        faults.append(
            "objective.name=xtoken learns from a model with another tokenizer; name its recipe with "
            "objective.teacher_recipe"
        )
    elif asked and not teachers:
        faults.append(
            f"{full} runs a second model in every step; name its recipe with objective.teacher_recipe, or put the "
            "teacher's likeliest tokens into the data and set top_k"
        )
    if needed is not None and not fused_head:
        setting = "objective.name=xtoken" if across else full
        faults.append(
            f"fused_head=false keeps all logits of the student, and {setting} would keep the teacher's too; unset it"
        )
    if teachers and needed is None:
        faults.append(
            f"objective.teacher_recipe={', '.join(teachers)}: only objective.name=distill with "
            "objective.options.teacher=full, and xtoken, run a second model; unset it"
        )
    elif len(teachers) > 1 and not across:
        faults.append(f"objective.teacher_recipe names {len(teachers)} recipes, but distill has one teacher")
    if given.teacher_tensor_model_parallel_size and not asked:
        faults.append(
            "objective.teacher_tensor_model_parallel_size applies only to teachers that run in every step; unset it"
        )
    if faults:
        raise RecipeError("; ".join(faults))


def make_bound_objective(recipe: Recipe) -> Objective:
    """Return a recipe's objective; raises RecipeError if a tokenizer, projection or teacher's recipe does not fit."""
    objective = make_settings(recipe.objective)
    if not isinstance(objective, CrossTokenizer):
        return objective
    return bind(
        objective,
        recipe.data,
        teacher_recipes(recipe),
        sharing=recipe.batch.sharing,
        pad_to_multiple_of=recipe.padding.multiple,
        block_rows=recipe.head_chunk_rows,
    )
