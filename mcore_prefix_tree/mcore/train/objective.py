"""A recipe's objective, and what it asks of the step around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
from pydantic import ValidationError

from mcore_prefix_tree.mcore.forward_step import (
    ForwardObjective,
    ForwardStep,
    ValueObjective,
    objective_forward_step,
    sft_forward_step,
)
from mcore_prefix_tree.mcore.output_layer import Output
from mcore_prefix_tree.objectives import (
    KTO,
    OBJECTIVES,
    Distillation,
    PolicyGradient,
    SupervisedFineTuning,
    make_objective,
)
from mcore_prefix_tree.objectives.scored import MissingSignalError
from mcore_prefix_tree.recipe import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import Signals

# How to come by what a sample lacks, of the fields that a command can add.
_SCORES = {
    "old_logprobs": "`mcore-prefix-tree score` with the checkpoints that the samples were drawn from writes it",
    "ref_logprobs": "`mcore-prefix-tree score --reference FOLDER` writes it",
    "values": "`mcore-prefix-tree score` with the recipe of a critic writes it",
    "reward": "`mcore-prefix-tree score` with the recipe of a reward model writes one",
    "teacher": "`mcore-prefix-tree score --teacher-top-k K` with the recipe of the teacher writes it",
}


def objective_of(recipe: Recipe) -> ForwardObjective:
    """The objective that a recipe names.

    Raises:
        RecipeError: there is no such objective or option, an option is out of range, or the objective wants a second
            model and the recipe names none, or the reverse.
    """
    name, options = recipe.objective.name, recipe.objective.options
    try:
        objective = make_objective(name, options)
    except ValidationError as error:
        raise RecipeError("; ".join(_faults(name, error))) from None
    except ValueError as error:
        raise RecipeError(f"objective.name: {error}") from None
    has_model = isinstance(objective, Distillation) and objective.teacher == "full"
    if has_model and recipe.objective.teacher_recipe is None:
        raise RecipeError(
            "objective.options.teacher: full asks a second model in every step; name its recipe with "
            "objective.teacher_recipe, or put the teacher's likeliest tokens into the data and set top_k"
        )
    if has_model and not recipe.fused_head:
        raise RecipeError(
            "fused_head=false keeps all logits of the student, and objective.options.teacher: full would keep the "
            "teacher's too; leave fused_head out"
        )
    if recipe.objective.teacher_recipe is not None and not has_model:
        raise RecipeError(
            f"objective.teacher_recipe={recipe.objective.teacher_recipe}: only objective.name=distill with "
            "objective.options.teacher=full asks a second model; leave it out"
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


def check_samples(objective: ForwardObjective, samples: Sequence[Sample]) -> None:
    """See before the first step whether a later one would meet a sample that the objective cannot train on.

    Args:
        objective: of the recipe.
        samples: all of each pair, rollout or group that ``objective.grouped_by`` names.

    Raises:
        SampleError: a sample lacks what the objective reads of it, or contradicts the others of its group. Says which
            command adds what is missing, where one does.
    """
    if is_weighted_sum(objective):
        return
    if isinstance(objective, KTO):
        objective = replace(objective, reference_point="zero")  # the other is of a whole step
    try:
        objective.targets(samples)
    except MissingSignalError as error:
        if error.field not in _SCORES:
            raise
        way_out = _SCORES[error.field]
        if error.field == "old_logprobs" and isinstance(objective, PolicyGradient):
            way_out += (
                ", or set objective.options.on_policy=true if each step's samples are of the weights it starts with"
            )
        raise SampleError(f"{error}; {way_out}") from None


def check_steps(objective: ForwardObjective, steps: Iterable[tuple[int, Sequence[Sample]]]) -> None:
    """See before the first step what the samples of a whole step show alone, and would end the run when it comes.

    Args:
        objective: of the recipe.
        steps: iterations and their samples, which are looked at only for objectives that ask for it.

    Raises:
        SampleError: the objective cannot train on the samples of a step together.
    """
    if not isinstance(objective, KTO) or objective.reference_point != "mismatched":
        return
    for iteration, samples in steps:
        if not any(sample.signals.mismatched for sample in samples):
            raise SampleError(
                f"step {iteration}, which {samples[0].source} is in, has no mismatched sample, and kto with "
                "reference_point=mismatched needs one in every step; raise batch.global_batch_size, mix them in and "
                "keep the files' order with data.order=file, or set objective.options.reference_point=zero"
            )


def is_weighted_sum(objective: ForwardObjective) -> bool:
    """Whether the loss is ``sft_loss``, which reads no sample by itself."""
    return isinstance(objective, SupervisedFineTuning) and objective.normalise == "token"


def watches_entropy(objective: ForwardObjective) -> bool:
    """Whether the entropy is computed: it is what people watch of a policy, also where the loss does not read it."""
    return isinstance(objective, PolicyGradient)


def plain(recipe: Recipe, samples: Sequence[Sample]) -> tuple[Recipe, list[Sample]]:
    """What stands for the recipe's objective where it is verified, compared and calibrated.

    It asks nothing of the samples, and compares none with another: of a model with a vocabulary the supervised loss, of
    one with a scalar head half the mean square of the values, a critic whose returns are all 0.
    """
    if not recipe.objective.has_scalar_head:
        return replace(recipe, objective=ObjectiveConfig()), list(samples)
    zero = ObjectiveConfig(name="critic", options={"returns": "given", "clip_eps": None})
    regressed = [replace(sample, signals=Signals(returns=np.zeros(len(sample)))) for sample in samples]
    return replace(recipe, objective=zero), regressed


def forward_step_of(objective: ForwardObjective) -> ForwardStep:
    """What Megatron's schedules call."""
    if is_weighted_sum(objective):
        return sft_forward_step
    return partial(objective_forward_step, objective=objective, with_entropy=watches_entropy(objective))


def output_of(objective: ForwardObjective, *, fused_head: bool) -> Output:
    """What the last pipeline stage is asked for."""
    if isinstance(objective, ValueObjective):
        return "values"
    if not fused_head:
        return "logits"
    if is_weighted_sum(objective):
        return "weighted_sum"
    if isinstance(objective, Distillation) and objective.teacher == "full":
        return "logit_losses"
    return "edge_loss_and_entropy" if watches_entropy(objective) else "edge_loss"
