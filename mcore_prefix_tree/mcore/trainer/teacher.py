"""The recipes and the weights of a distillation's teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from megatron.core import parallel_state

from mcore_prefix_tree.mcore.engine.backend import cases_of, resolve_backend
from mcore_prefix_tree.mcore.engine.lessons import ExportedTeacher, PairedTeachers
from mcore_prefix_tree.mcore.engine.teacher import Teacher, TeacherModel
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.mcore.trainer import checkpoint
from mcore_prefix_tree.mcore.trainer.hf import described, load_folder
from mcore_prefix_tree.mcore.trainer.model import build_chunks, groups_of_whole, replicas_of_whole, transformer_config
from mcore_prefix_tree.mcore.trainer.resolve import Resolved
from mcore_prefix_tree.objectives import BoundCrossTokenizer
from mcore_prefix_tree.recipe import ModelConfig, ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.recipe.teacher import parallel_of_teachers
from mcore_prefix_tree.sample import Sample


def check_teachers(
    teachers: Sequence[tuple[str, Recipe]], student: ModelConfig, *, max_tokens: int, across_tokenizers: bool
) -> None:
    """Check that the models of recipes can be asked by a student.

    Args:
        teachers: from :func:`teacher_recipes`.
        student: its model.
        max_tokens: of its micro-batches.
        across_tokenizers: the objective compares texts, and not tokens.

    Raises:
        RecipeError: one has a scalar head, names no weights, or with the student's tokenizer has another vocabulary or
            shorter positions.
    """
    for path, teacher in teachers:
        setting, name = f"objective.teacher_recipe={path}", teacher.objective.name
        if teacher.objective.has_scalar_head:
            raise RecipeError(f"{setting}: its objective.name={name} has no vocabulary to learn from")
        if teacher.checkpoint.save is None and teacher.model.hf is None:
            raise RecipeError(
                f"{setting}: set its checkpoint.save, the folder of the teacher's checkpoints, or its model.hf"
            )
        if not across_tokenizers:
            _check_vocabulary(teacher.model, student, setting)
            _check_positions(teacher.model, student, max_tokens, setting)


def _check_vocabulary(teacher: ModelConfig, student: ModelConfig, setting: str) -> None:
    sizes = teacher.vocab_size, student.vocab_size
    if None not in sizes and sizes[0] != sizes[1]:
        raise RecipeError(
            f"{setting}: its model.vocab_size={sizes[0]}, but the student's is {sizes[1]}; whole vocabularies are "
            "compared token by token"
        )


def _check_positions(teacher: ModelConfig, student: ModelConfig, max_tokens: int, setting: str) -> None:
    """Sooner than at the first sample that is too long for the teacher."""
    if teacher.position_embedding_type != "learned_absolute":
        return
    limits = {"batch.max_tokens": max_tokens}
    if student.position_embedding_type == "learned_absolute":
        limits["model.max_position_embeddings"] = student.max_position_embeddings
    name = min(limits, key=lambda name: limits[name])
    has = teacher.max_position_embeddings
    if has < limits[name]:
        raise RecipeError(
            f"{setting}: its learned positions end at model.max_position_embeddings={has}, but the student's samples "
            f"may have {name}={limits[name]} tokens; lower that"
        )


def load_teachers(
    teachers: Sequence[tuple[str, Recipe]], student: Resolved, *, say: Callable[[str], None]
) -> Teacher | None:
    """Return whom a job asks before its student, with the weights of the last checkpoints; None if nobody.

    Args:
        teachers: checked by :func:`check_teachers`; none if the objective asks no second model.
        student: of whose first step ``attention_backend: auto`` takes a look.
        say: receives which weights they are, on every rank.

    Raises:
        RecipeError: there is no such model in the student's parallel layout, no checkpoint, or it does not fit.
        NotImplementedError: folding cannot do the teacher exactly; see :func:`check_config`.
        ValueError: see :func:`resolve_backend`.
    """
    job, device = student.recipe, student.job.folding.device
    parallel = job.parallel
    recipes = [
        replace(
            teacher,
            objective=ObjectiveConfig(),
            parallel=parallel_of_teachers(job.objective, parallel),
            fused_head=True,
            device=job.device,
            deterministic_attention=job.deterministic_attention,
        )
        for _, teacher in teachers
    ]
    size = student.recipe.model.vocab_size
    assert size is not None, "resolved"
    load = partial(load_model, first_step=student.first_step, device=device, say=say)
    if not student.job.objective.across_tokenizers:
        return load(recipes[0], size) if recipes else None
    objective = cast("BoundCrossTokenizer", student.job.objective)
    columns = parallel.padded_vocab_size(size) // parallel.tensor_model_parallel_size
    if not recipes:
        return ExportedTeacher(objective=objective, models=(), student_columns=columns, device=device)
    padded = {
        parallel.padded_vocab_size(recipe.model.vocab_size or side.teacher_size)
        for recipe, side in zip(recipes, objective.sides, strict=True)
    }
    if objective.settings.teachers == "averaged_logits" and len(padded) > 1:
        raise RecipeError(
            f"objective.options.teachers=averaged_logits adds logits, but the teachers have {min(padded)} and "
            f"{max(padded)} of them; give their recipes one model.vocab_size"
        )
    models = [
        load(recipe, vocabulary_of(recipe.model, side.teacher_size))
        for recipe, side in zip(recipes, objective.sides, strict=True)
    ]
    return PairedTeachers(objective=objective, models=models, student_columns=columns, device=device)


def vocabulary_of(model: ModelConfig, tokens: int) -> int:
    """Return the size of a teacher's vocabulary, from its recipe or else its tokenizer's ``tokens``.

    Raises:
        RecipeError: the recipe's is smaller.
    """
    own = model.vocab_size
    if own is not None and own < tokens:
        raise RecipeError(
            f"the teacher's model.vocab_size={own} is smaller than its tokenizer's {tokens}; raise it or leave it out"
        )
    return own or tokens


def load_model(
    recipe: Recipe,
    vocab_size: int,
    *,
    first_step: Callable[[], Sequence[Sample]],
    device: torch.device,
    say: Callable[[str], None],
) -> TeacherModel:
    """Return one teacher with the weights of its last checkpoint.

    Args:
        recipe: of the teacher, with the parallel layout of the job.
        vocab_size: before padding.
        first_step: returns samples that ``attention_backend: auto`` takes a look at.
        device: of the model.
        say: receives which weights they are, on every rank.

    Raises:
        RecipeError, NotImplementedError, ValueError: see :func:`load_teachers`.
    """
    try:
        config = transformer_config(recipe.model, recipe.parallel, on_gpu=device.type == "cuda")
        check_config(config)
        model = described(recipe.model, config)
    except (RecipeError, NotImplementedError) as error:
        raise type(error)(f"of the teacher: {error}") from error
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    is_whole = recipe.parallel.tensor_model_parallel_size < ranks
    if is_whole and (recipe.model.hf is not None or config.num_moe_experts is not None):
        raise RecipeError(
            "objective.teacher_tensor_model_parallel_size=1 beside a student that is cut goes with teachers without "
            "experts and without model.hf; leave it out"
        )
    deterministic = recipe.deterministic_attention
    backend = resolve_backend(recipe.attention_backend, config, first_step, device=device, deterministic=deterministic)
    chunks = build_chunks(
        model,
        config,
        # A whole teacher is padded as one that is cut: each rank takes as many columns.
        vocab_size=replace(recipe.parallel, tensor_model_parallel_size=ranks).padded_vocab_size(vocab_size),
        device=device,
        groups=groups_of_whole() if is_whole else None,
    )
    weights = _fill(chunks, recipe.checkpoint.save, model, is_whole=is_whole)
    for chunk in chunks:
        chunk.requires_grad_(False)
    say(f"the teacher's weights are {weights}")
    cases = cases_of(config, device=device, deterministic=deterministic)
    return TeacherModel(
        chunks=chunks,
        attention_backend=backend,
        attention_cases=cases,
        columns_over=parallel_state.get_tensor_model_parallel_group() if is_whole else None,
    )


def _fill(chunks: list[torch.nn.Module], folder: str | None, model: ModelConfig, *, is_whole: bool) -> str | Path:
    """Fill a teacher with its last checkpoint or, if it names none, with its Hugging Face folder; return which."""
    if folder is None:
        assert model.hf is not None, "check_teachers asks for one of them"
        try:
            load_folder(model.hf, chunks)
        except RecipeError as error:
            raise RecipeError(f"of the teacher: {error}") from error
        return model.hf
    iteration = everyone(checkpoint.latest_weights(folder))[0]
    if iteration is None:
        raise RecipeError(f"the teacher's checkpoint.save={folder} holds no checkpoint; name the folder of a run")
    replicas = replicas_of_whole() if is_whole else None
    checkpoint.load_weights(folder, iteration, chunks, model=model, replicas=replicas)
    return checkpoint.iteration_folder(folder, iteration)
