"""Recipes of teachers: files, or Hugging Face folders, which need none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_prefix_tree.objectives.objective import SecondModels
from mcore_prefix_tree.settings.hf_folder import CONFIG, HuggingFaceFolder
from mcore_prefix_tree.settings.load import load_recipe
from mcore_prefix_tree.settings.model_section import ModelConfig
from mcore_prefix_tree.settings.sections import CheckpointConfig, ObjectiveConfig, ParallelConfig, Recipe, RecipeError


def teacher_recipes(student: Recipe) -> list[tuple[str, Recipe]]:
    """Return the teachers of a job: each path that it names, and its recipe.

    A Hugging Face folder stands for its weights and its own tokenizer, with the student's precision, layers and
    attention back-end. Raises RecipeError as :func:`load_recipe` and :meth:`HuggingFaceFolder.read` do.
    """
    return [
        (
            path,
            replace(
                student,
                model=_teacher_model_config(path, student.model),
                data=replace(student.data, tokenizer=path),
                objective=ObjectiveConfig(),
                checkpoint=CheckpointConfig(),
            )
            if (Path(path) / CONFIG).is_file()
            else load_recipe(path),
        )
        for path in student.objective.teacher_recipes
    ]


def check_asked_teachers(
    needed: SecondModels, teachers: Sequence[tuple[str, Recipe]], model: ModelConfig, max_tokens: int
) -> None:
    """Check that each step can ask the teachers of a student, which has this model and ``batch.max_tokens``.

    Raises RecipeError if a teacher has a scalar head or names no weights, or if one with the student's tokenizer has
    another vocabulary or shorter positions.
    """
    for path, teacher in teachers:
        setting, name = f"objective.teacher_recipe={path}", teacher.objective.name
        if teacher.model.transformer.get("fp8"):
            raise RecipeError(f"{setting}: a teacher computes without FP8; remove its model.transformer.fp8")
        if teacher.objective.has_scalar_head:
            raise RecipeError(f"{setting}: its objective.name={name} has no vocabulary to learn from")
        if teacher.checkpoint.save is None and teacher.model.hf is None:
            raise RecipeError(
                f"{setting}: set its checkpoint.save, the folder of the teacher's checkpoints, or its model.hf"
            )
        if needed.same_vocabulary:
            sizes = teacher.model.vocab_size, model.vocab_size
            if None not in sizes and sizes[0] != sizes[1]:
                raise RecipeError(
                    f"{setting}: its model.vocab_size={sizes[0]}, but the student's is {sizes[1]}; full vocabularies "
                    "are compared token by token"
                )
            _check_positions(teacher.model, model, {"batch.max_tokens": max_tokens}, setting)


def _check_positions(teacher: ModelConfig, student: ModelConfig, limits: dict[str, int], setting: str) -> None:
    """Check the positions before the first sample that is too long for the teacher."""
    if teacher.position_embedding_type != "learned_absolute":
        return
    if student.position_embedding_type == "learned_absolute":
        limits["model.max_position_embeddings"] = student.max_position_embeddings
    name = min(limits, key=lambda name: limits[name])
    has = teacher.max_position_embeddings
    if has < limits[name]:
        raise RecipeError(
            f"{setting}: its learned positions end at model.max_position_embeddings={has}, but the student's samples "
            f"may have {name}={limits[name]} tokens; lower that"
        )


def list_teacher_inputs(objective: ObjectiveConfig) -> list[str]:
    """Return the files, globs and folders that the teachers' recipes name; one that cannot be read has none here."""
    inputs: list[str] = []
    for path in objective.teacher_recipes:
        if not Path(path).is_dir():
            with suppress(OSError, ValueError):
                inputs += load_recipe(path).inputs
    return inputs


def _teacher_model_config(path: str, student: ModelConfig) -> ModelConfig:
    try:
        folder = HuggingFaceFolder.read(path)
        sizes: dict[str, Any] = folder.sizes
    except (OSError, ValueError) as error:
        raise RecipeError(f"objective.teacher_recipe: {error}") from error
    if folder.has_scalar_head:
        raise RecipeError(f"objective.teacher_recipe={path} ends in a scalar head, which has no vocabulary")
    return ModelConfig(hf=path, dtype=student.dtype, transformer_impl=student.transformer_impl, **sizes)


def check_stage(ranks: int, objective: ObjectiveConfig) -> None:
    """Raise RecipeError if the teachers' tensor-parallel size does not divide the ranks of a pipeline stage."""
    size = objective.teacher_tensor_model_parallel_size or 1
    if ranks % size:
        raise RecipeError(
            f"objective.teacher_tensor_model_parallel_size={size} does not divide the {ranks} ranks of a pipeline "
            "stage; choose one that does"
        )


def parallel_of_teachers(objective: ObjectiveConfig, parallel: ParallelConfig) -> ParallelConfig:
    """Return the teachers' layout; raises RecipeError if its size is neither 1 nor a multiple of the student's."""
    given, own = objective.teacher_tensor_model_parallel_size, parallel.tensor_model_parallel_size
    if given is None or given == own:
        return parallel
    if given != 1 and given % own:
        raise RecipeError(
            f"objective.teacher_tensor_model_parallel_size={given} is neither 1, which keeps teachers uncut on each "
            f"rank, nor a multiple of parallel.tensor_model_parallel_size={own}; change it, or unset it to cut "
            "teachers as their student"
        )
    return replace(parallel, tensor_model_parallel_size=given, sequence_parallel=False)
