"""Recipes of teachers: files, or Hugging Face folders, which need none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_prefix_tree.recipe.hf import CONFIG, HuggingFaceFolder
from mcore_prefix_tree.recipe.load import load_recipe
from mcore_prefix_tree.recipe.sections import (
    CheckpointConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    Recipe,
    RecipeError,
)


def teacher_recipes(student: Recipe) -> list[tuple[str, Recipe]]:
    """Return what ``objective.teacher_recipe`` names: each path, and the recipe that it stands for.

    A Hugging Face folder stands for its weights and its own tokenizer, with the student's precision, layers and
    attention back-end.

    Raises:
        RecipeError: see :func:`load_recipe` and :meth:`HuggingFaceFolder.read`.
    """
    return [
        (
            path,
            replace(
                student,
                model=_model_of(path, student.model),
                data=replace(student.data, tokenizer=path),
                objective=ObjectiveConfig(),
                checkpoint=CheckpointConfig(),
            )
            if (Path(path) / CONFIG).is_file()
            else load_recipe(path),
        )
        for path in student.objective.teacher_recipes
    ]


def _model_of(path: str, student: ModelConfig) -> ModelConfig:
    try:
        folder = HuggingFaceFolder.read(path)
        sizes: dict[str, Any] = folder.sizes
    except (OSError, ValueError) as error:
        raise RecipeError(f"objective.teacher_recipe: {error}") from error
    if folder.has_scalar_head:
        raise RecipeError(f"objective.teacher_recipe={path} ends in a scalar head, which has no vocabulary")
    return ModelConfig(hf=path, dtype=student.dtype, transformer_impl=student.transformer_impl, **sizes)


def parallel_of_teachers(objective: ObjectiveConfig, parallel: ParallelConfig) -> ParallelConfig:
    """Return the parallel layout of a job's teachers.

    Raises:
        RecipeError: ``objective.teacher_tensor_model_parallel_size`` is neither 1 nor the student's.
    """
    given = objective.teacher_tensor_model_parallel_size
    if given is None or given == parallel.tensor_model_parallel_size:
        return parallel
    if given != 1:
        raise RecipeError(
            f"objective.teacher_tensor_model_parallel_size={given}: teachers are cut as the student is, "
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size}, or whole on each rank; set 1 "
            "or leave it out; in another layout they can export their rows with mcore-prefix-tree xtoken export-teacher"
        )
    return replace(parallel, tensor_model_parallel_size=1, sequence_parallel=False)
