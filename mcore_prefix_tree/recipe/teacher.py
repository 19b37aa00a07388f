"""Recipes of teachers: files, or Hugging Face folders, which need none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_prefix_tree.recipe.hf import CONFIG, HuggingFaceFolder
from mcore_prefix_tree.recipe.load import load_recipe
from mcore_prefix_tree.recipe.sections import CheckpointConfig, ModelConfig, ObjectiveConfig, Recipe, RecipeError


def teacher_recipe(path: str, student: Recipe) -> Recipe:
    """Return the recipe of a teacher.

    Args:
        path: from ``objective.teacher_recipe``: of a recipe, or of a Hugging Face folder: its weights, with the
            student's precision, layers and attention back-end, and its own tokenizer.
        student: of the job.

    Raises:
        RecipeError: see :func:`load_recipe` and :meth:`HuggingFaceFolder.read`.
    """
    if not (Path(path) / CONFIG).is_file():
        return load_recipe(path)
    try:
        folder = HuggingFaceFolder.read(path)
        sizes: dict[str, Any] = folder.sizes
    except (OSError, ValueError) as error:
        raise RecipeError(f"objective.teacher_recipe: {error}") from error
    if folder.has_scalar_head:
        raise RecipeError(f"objective.teacher_recipe={path} ends in a scalar head, which has no vocabulary")
    model = ModelConfig(hf=path, dtype=student.model.dtype, transformer_impl=student.model.transformer_impl, **sizes)
    data = replace(student.data, tokenizer=path)
    return replace(student, model=model, data=data, objective=ObjectiveConfig(), checkpoint=CheckpointConfig())
