"""A recipe's objective, with tokenizers and projections for one across tokenizers.

Tokenizers and projections are read before any model is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mcore_prefix_tree.data import ChatTokenizer, load_tokenizer
from mcore_prefix_tree.objectives import (
    BoundCrossTokenizer,
    CrossTokenizer,
    Objective,
    TeacherSide,
    make_objective,
    option_faults,
)
from mcore_prefix_tree.settings.model_section import ModelConfig
from mcore_prefix_tree.settings.sections import DataConfig, ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.settings.teachers import teacher_recipes
from mcore_prefix_tree.utils.errors import naming
from mcore_prefix_tree.xtoken.modes import Reads
from mcore_prefix_tree.xtoken.pairs import Pairing
from mcore_prefix_tree.xtoken.projection_file import read_projection


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
    """Return a recipe's objective, for one across tokenizers with tokenizers and projections.

    Raises RecipeError for one that is missing or does not fit, ValueError or OSError for one that cannot be read.
    """
    settings = make_settings(recipe.objective)
    if not isinstance(settings, CrossTokenizer):
        return settings
    reads, teachers = settings.losses.reads, teacher_recipes(recipe)
    projections = _projections(settings, reads, len(teachers))
    student = load_named_tokenizer(recipe.data, "data.tokenizer")
    sides = [
        _side(make_pairing(settings, student, path, teacher.data, teacher.model), projection)
        for (path, teacher), projection in zip(teachers, projections, strict=True)
    ]
    for side in sides:
        if settings.top_k is not None and settings.top_k > side.teacher_size:
            raise RecipeError(
                f"objective.options.top_k={settings.top_k} is more than the {side.teacher_size} tokens of the teacher; "
                "unset it to compare all"
            )
    with naming("objective.options: ", RecipeError):
        return BoundCrossTokenizer(
            settings=settings,
            sides=tuple(sides),
            sharing=recipe.batch.sharing,
            pad_to_multiple_of=recipe.padding.multiple,
            block_rows=recipe.head_chunk_rows,
        )


def make_pairing(
    settings: CrossTokenizer, student: ChatTokenizer, path: str, data: DataConfig, model: ModelConfig
) -> Pairing:
    """Return the pairing of a student's samples with those of a teacher, by two sections of its recipe at ``path``."""
    limits = {}
    if model.position_embedding_type == "learned_absolute":
        limits[f"model.max_position_embeddings of {path}"] = model.max_position_embeddings
    tokenizer = load_named_tokenizer(data, f"objective.teacher_recipe={path}: its data.tokenizer")
    return Pairing(student, tokenizer, aligner=settings.aligner, teacher_limits=limits)


def _side(pairing: Pairing, projection: str | None) -> TeacherSide:
    tables = pairing.student, pairing.teacher
    if projection is not None and not Path(projection).is_file():
        raise RecipeError(
            f"objective.options.projection={projection}: no such file; make it with mcore-prefix-tree xtoken "
            "build-projection"
        )
    return TeacherSide(
        pairing=pairing,
        student_size=pairing.student.vocab_size,
        teacher_size=pairing.teacher.vocab_size,
        projection=None if projection is None else read_projection(projection, student=tables[0], teacher=tables[1]),
    )


def load_named_tokenizer(data: DataConfig, setting: str) -> ChatTokenizer:
    """Return the tokenizer of a section; raises RecipeError, with the setting, if it names none."""
    if data.tokenizer is None:
        raise RecipeError(f"{setting} is missing; objective.name=xtoken aligns the texts of two tokenizers")
    return load_tokenizer(data.tokenizer, data.chat_template_kwargs)


def _projections(settings: CrossTokenizer, reads: Reads, teachers: int) -> Sequence[str | None]:
    given = settings.projection
    if not reads.projection:
        return [None] * teachers
    if given is None:
        raise RecipeError(
            f"objective.options.projection is missing, which mode={settings.mode} reads; make one with "
            "mcore-prefix-tree xtoken build-projection"
        )
    files = [given] if isinstance(given, str) else given
    if len(files) != teachers:
        raise RecipeError(
            f"objective.options.projection names {len(files)} files, but objective.teacher_recipe {teachers} teachers; "
            "name one for each"
        )
    return files
