"""The teachers of a distillation across tokenizers, loaded into the hook that runs them before a step."""

from __future__ import annotations

from mcore_prefix_tree.mcore.engine.lessons import ExportedTeacher, PairedTeachers
from mcore_prefix_tree.mcore.models.teacher import TeacherLoading, vocabulary_of
from mcore_prefix_tree.recipe import RecipeError


def chunk_teachers(loading: TeacherLoading) -> PairedTeachers:
    """Return the hook of the teachers, or of rows that the samples bring.

    Raises:
        RecipeError: the logits of the teachers cannot be averaged.
    """
    objective, device = loading.objective, loading.device
    columns = loading.padded_vocab_size // loading.parallel.tensor_model_parallel_size
    if not loading.recipes:
        return ExportedTeacher(objective=objective, models=(), student_columns=columns, device=device)
    # As many columns on each rank of the teacher, and on each of the student.
    cut = max(loading.layout, loading.parallel, key=lambda one: one.tensor_model_parallel_size)
    tokens = [side.teacher_size for side in objective.sides]
    sizes = [
        cut.padded_vocab_size(vocabulary_of(recipe.model, size))
        for recipe, size in zip(loading.recipes, tokens, strict=True)
    ]
    if objective.settings.teachers == "averaged_logits" and len(set(sizes)) > 1:
        raise RecipeError(
            f"{loading.names.options}.teachers=averaged_logits adds logits, but the teachers have {min(sizes)} and "
            f"{max(sizes)} of them; give their recipes one model.vocab_size"
        )
    models = loading.models(list(zip(tokens, sizes, strict=True)))
    return PairedTeachers(objective=objective, models=models, student_columns=columns, device=device)
