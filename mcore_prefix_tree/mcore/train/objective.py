"""A recipe's objective, and what it asks of the step around it."""

from __future__ import annotations

from dataclasses import fields

from pydantic import ValidationError

from mcore_prefix_tree.data.grouping import GroupedBy
from mcore_prefix_tree.mcore.forward_step import LogprobObjective
from mcore_prefix_tree.mcore.output_layer import Output
from mcore_prefix_tree.objectives import (
    OBJECTIVES,
    PolicyGradient,
    Preference,
    SupervisedFineTuning,
    make_objective,
)
from mcore_prefix_tree.recipe import Recipe, RecipeError

_ADVANTAGES_OF_GROUPS = ("group_mean", "group_mean_std", "leave_one_out")


def objective_of(recipe: Recipe) -> LogprobObjective:
    """The objective that a recipe names.

    Raises:
        RecipeError: there is no such objective or option, an option is out of range, or the objective reads something
            that the trainer's model does not compute.
    """
    name, options = recipe.objective.name, recipe.objective.options
    try:
        objective = make_objective(name, options)
    except ValidationError as error:
        raise RecipeError("; ".join(_faults(name, error))) from None
    except ValueError as error:
        raise RecipeError(f"objective.name: {error}") from None
    if not isinstance(objective, LogprobObjective):
        raise RecipeError(
            f"objective.name={name} reads {objective.reads}, and train computes log-probabilities only; call "
            f"mcore_prefix_tree.objectives.{type(objective).__name__} from a trainer of your own"
        )
    return objective


def _faults(name: str, error: ValidationError) -> list[str]:
    faults = []
    for fault in error.errors():
        option = ".".join(map(str, fault["loc"]))
        if fault["type"] == "unexpected_keyword_argument":
            known = ", ".join(field.name for field in fields(OBJECTIVES[name][0]))
            faults.append(f"objective.options.{option}: {name} has no such option; it has {known}")
        elif option:
            message = fault["msg"]
            faults.append(f"objective.options.{option}: {message[0].lower()}{message[1:]} (given {fault['input']!r})")
        else:
            faults.append(f"objective.options: {fault['ctx']['error']}")
    return faults


def grouped_by(objective: LogprobObjective) -> GroupedBy | None:
    """Which samples have to be in one step, because they are compared with each other."""
    if isinstance(objective, Preference):
        return "pair"
    of_groups = isinstance(objective, PolicyGradient) and objective.advantage in _ADVANTAGES_OF_GROUPS
    of_groups |= isinstance(objective, SupervisedFineTuning | PolicyGradient) and objective.normalise == "group"
    return "group" if of_groups else None


def is_weighted_sum(objective: LogprobObjective) -> bool:
    """Whether the loss is ``sft_loss``, which reads no sample by itself."""
    return isinstance(objective, SupervisedFineTuning) and objective.normalise == "token"


def watches_entropy(objective: LogprobObjective) -> bool:
    """Whether the entropy is computed: it is what people watch of a policy, also where the loss does not read it."""
    return isinstance(objective, PolicyGradient)


def output_of(objective: LogprobObjective, *, fused_head: bool) -> Output:
    """What the last pipeline stage is asked for."""
    if not fused_head:
        return "logits"
    if is_weighted_sum(objective):
        return "weighted_sum"
    return "logprobs_and_entropy" if watches_entropy(objective) else "logprobs"
