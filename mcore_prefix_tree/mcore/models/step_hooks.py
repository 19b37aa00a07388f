"""The step hook of a job, by the output that its objective names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron.core import parallel_state

from mcore_prefix_tree.mcore.engine.hook import StepHook
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.models.chunk_teachers import chunk_teachers
from mcore_prefix_tree.mcore.models.teacher import TeacherLoading, load_model, same_vocabulary_teacher
from mcore_prefix_tree.objectives.objective import Output
from mcore_prefix_tree.recipe import ModelConfig, ObjectiveConfig, ParallelConfig, Recipe
from mcore_prefix_tree.recipe.teacher import IN_RECIPES, SettingNames, check_stage, parallel_of_teachers
from mcore_prefix_tree.sample import Sample

# Objectives with other outputs need nothing before a step.
HOOKS: Mapping[Output, Callable[[TeacherLoading], StepHook]] = {
    "divergences": same_vocabulary_teacher,
    "chunks": chunk_teachers,
}


def load_hook(
    teachers: Sequence[tuple[str, Recipe]],
    student: Recipe,
    job: Job,
    *,
    first_step: Callable[[], Sequence[Sample]],
    vocab_size: int,
    padded_vocab_size: int,
    say: Callable[[str], None],
    on_last_stage: bool = False,
    names: SettingNames = IN_RECIPES,
) -> StepHook:
    """Return what a job's objective needs before a step, such as teachers with their last checkpoints' weights.

    Args:
        teachers: recipes that :func:`check_teachers` checked; empty if the objective asks no second model.
        student: recipe of the job.
        job: job without its hook.
        first_step: function that returns samples for a teacher's ``attention_backend: auto`` to look at.
        vocab_size: number of tokens of the student's vocabulary.
        padded_vocab_size: number of rows of its embedding.
        say: function that receives which weights they are, on every rank.
        on_last_stage: see :class:`TeacherLoading`.
        names: names of the settings, for messages.

    Raises:
        RecipeError, NotImplementedError, ValueError: see :func:`load_model` and the functions of :data:`HOOKS`.
    """
    make = HOOKS.get(job.objective.output)
    if make is None:
        return StepHook()
    layout, device = parallel_of_teachers(student.objective, student.parallel, names), job.folding.device
    if on_last_stage:
        layout = replace(layout, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None)
    recipes = [
        replace(
            teacher,
            objective=ObjectiveConfig(),
            parallel=_for(teacher.model, layout),
            fused_head=True,
            device=student.device,
            deterministic_attention=student.deterministic_attention,
        )
        for _, teacher in teachers
    ]
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    check_stage(stage.size(), student.objective, names)
    return make(
        TeacherLoading(
            objective=job.objective,
            recipes=recipes,
            parallel=student.parallel,
            layout=layout,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            device=device,
            on_last_stage=on_last_stage,
            names=names,
            load=partial(load_model, first_step=first_step, device=device, say=say),
        )
    )


def _for(model: ModelConfig, layout: ParallelConfig) -> ParallelConfig:
    """Return the layout of a teacher, whose student may be the only one with experts."""
    has_experts = model.hf is not None or model.transformer.get("num_moe_experts") is not None
    return layout if has_experts else replace(layout, expert_model_parallel_size=1)
