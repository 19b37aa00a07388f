"""The recipes and the weights of a distillation's teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_prefix_tree.mcore.engine.backend import cases_of, resolve_backend
from mcore_prefix_tree.mcore.engine.teacher import TeacherModel
from mcore_prefix_tree.mcore.engine.teacher_ranks import TeacherRanks
from mcore_prefix_tree.mcore.models import checkpoint
from mcore_prefix_tree.mcore.models.hf import described
from mcore_prefix_tree.mcore.models.lora import load_start
from mcore_prefix_tree.mcore.models.model import build_chunks, transformer_config
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.recipe import ModelConfig, ParallelConfig, Recipe, RecipeError
from mcore_prefix_tree.recipe.teacher import IN_RECIPES, SettingNames, teacher_recipes
from mcore_prefix_tree.sample import Sample


def check_teachers(
    teachers: Sequence[tuple[str, Recipe]],
    student: ModelConfig,
    *,
    max_tokens: int,
    same_vocabulary: bool,
    names: SettingNames = IN_RECIPES,
) -> None:
    """Check that a student can ask the models of recipes.

    Args:
        teachers: recipes of the teachers, from :func:`teacher_recipes`.
        student: model of the student.
        max_tokens: token budget of the student's micro-batches.
        same_vocabulary: whether the objective compares tokens instead of texts.
        names: names of the settings, for messages.

    Raises:
        RecipeError: a teacher has a scalar head, names no weights, or with the student's tokenizer has another
            vocabulary or shorter positions.
    """
    for path, teacher in teachers:
        setting, name = f"{names.teacher}={path}", teacher.objective.name
        if teacher.objective.has_scalar_head:
            raise RecipeError(f"{setting}: its objective.name={name} has no vocabulary to learn from")
        if teacher.checkpoint.save is None and teacher.model.hf is None:
            raise RecipeError(
                f"{setting}: set its checkpoint.save, the folder of the teacher's checkpoints, or its model.hf"
            )
        if same_vocabulary:
            _check_vocabulary(teacher.model, student, setting)
            _check_positions(teacher.model, student, {names.max_tokens: max_tokens}, setting)


def _check_vocabulary(teacher: ModelConfig, student: ModelConfig, setting: str) -> None:
    sizes = teacher.vocab_size, student.vocab_size
    if None not in sizes and sizes[0] != sizes[1]:
        raise RecipeError(
            f"{setting}: its model.vocab_size={sizes[0]}, but the student's is {sizes[1]}; whole vocabularies are "
            "compared token by token"
        )


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


def asked_teachers(objective: Objective, student: Recipe, names: SettingNames = IN_RECIPES) -> list[tuple[str, Recipe]]:
    """Return the recipes of the teachers that each step asks, checked; none if the objective asks no model.

    Args:
        objective: objective of the job.
        student: recipe of the job.
        names: names of the settings, for messages.

    Raises:
        RecipeError: see :func:`teacher_recipes` and :func:`check_teachers`.
    """
    needed = objective.second_models
    if needed is None or not needed.asked:
        return []
    teachers, most = teacher_recipes(student, names), student.batch.max_tokens
    check_teachers(teachers, student.model, max_tokens=most, same_vocabulary=needed.same_vocabulary, names=names)
    return teachers


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherLoading:
    """Teachers of a job, and the place where their models go.

    Attributes:
        objective: objective of the job.
        recipes: recipes of the teachers whose models are asked, with the settings that they share with the student.
        parallel: parallel layout of the student.
        layout: parallel layout of the teachers.
        vocab_size: number of tokens of the student's vocabulary.
        padded_vocab_size: number of rows of its embedding.
        device: device of the job.
        on_last_stage: whether all layers of a teacher are on the student's last pipeline stage; else it has the same
            stages.
        names: names of the settings, for messages.
        load: :func:`load_model` with the arguments that all teachers have in common, except ``ranks``.
    """

    objective: Any
    recipes: Sequence[Recipe]
    parallel: ParallelConfig
    layout: ParallelConfig
    vocab_size: int
    padded_vocab_size: int
    device: torch.device
    on_last_stage: bool
    names: SettingNames
    load: Callable[..., TeacherModel]

    def models(self, sizes: Sequence[tuple[int, int]]) -> list[TeacherModel]:
        """Return the teachers with the weights of their last checkpoints.

        Args:
            sizes: each one's number of tokens, and of rows of its embedding.
        """
        ranks = TeacherRanks.of(self.layout.tensor_model_parallel_size, on_last_stage=self.on_last_stage)
        return [self.load(recipe, *of, ranks=ranks) for recipe, of in zip(self.recipes, sizes, strict=True)]


def same_vocabulary_teacher(loading: TeacherLoading) -> TeacherModel:
    """Return the hook that runs a teacher of the student's vocabulary.

    Raises:
        RecipeError: the vocabulary cannot be cut evenly over the teacher's ranks.
    """
    columns, ranks = loading.padded_vocab_size, loading.layout.tensor_model_parallel_size
    if columns % ranks:
        raise RecipeError(
            f"{loading.names.teacher_tensor_parallel}={ranks} does not divide the {columns} tokens of the vocabulary, "
            "padding included, in which teacher and student are compared; choose another, or leave it out"
        )
    (model,) = loading.models([(loading.vocab_size, columns)])
    return model


def vocabulary_of(model: ModelConfig, tokens: int) -> int:
    """Return the size of a teacher's vocabulary, from its recipe or else its tokenizer's ``tokens``.

    Raises:
        RecipeError: the recipe's size is smaller.
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
    padded_vocab_size: int,
    *,
    first_step: Callable[[], Sequence[Sample]],
    device: torch.device,
    say: Callable[[str], None],
    ranks: TeacherRanks | None = None,
) -> TeacherModel:
    """Return one teacher with the weights of its last checkpoint.

    Args:
        recipe: recipe of the teacher, with its parallel layout.
        vocab_size: number of tokens of the vocabulary.
        padded_vocab_size: number of rows of the embedding.
        first_step: function that returns samples for ``attention_backend: auto`` to look at.
        device: device of the model.
        say: function that receives which weights they are, on every rank.
        ranks: ranks of a layout other than the job's; None takes the job's.

    Raises:
        RecipeError: this parallel layout has no such model, or the checkpoint is missing or does not fit.
        NotImplementedError: folding cannot do the teacher exactly; see :func:`check_config`.
        ValueError: see :func:`resolve_backend`.
    """
    try:
        config = transformer_config(recipe.model, recipe.parallel, on_gpu=device.type == "cuda")
        check_config(config)
        model = described(recipe.model, config)
    except (RecipeError, NotImplementedError) as error:
        raise type(error)(f"of the teacher: {error}") from error
    if ranks is not None:
        _check_other_layout(recipe.model, config, tensor_parallel=ranks.groups.tp.size())
    deterministic = recipe.deterministic_attention
    backend = resolve_backend(recipe.attention_backend, config, first_step, device=device, deterministic=deterministic)
    groups = None if ranks is None else ranks.groups
    chunks = []
    if ranks is None or ranks.is_here:
        chunks = build_chunks(
            model, config, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, device=device, groups=groups
        )
    weights = _fill(chunks, recipe.checkpoint.save, model, replicas=None if groups is None else groups.dp_cp)
    for chunk in chunks:
        chunk.requires_grad_(False)
    say(f"the teacher's weights are {weights}")
    cases = cases_of(config, device=device, deterministic=deterministic)
    return TeacherModel(chunks=chunks, attention_backend=backend, attention_cases=cases, ranks=ranks)


def _check_other_layout(model: ModelConfig, config: TransformerConfig, *, tensor_parallel: int) -> None:
    """Check that a teacher can be cut over other ranks than its student."""
    if model.hf is not None or config.num_moe_experts is not None:
        raise RecipeError(
            "of the teacher: with experts or model.hf it is cut as its student is; leave its tensor-parallel size out, "
            "and beside pipeline stages of Megatron-LM export its rows with mcore-prefix-tree xtoken export-teacher"
        )
    groups = config.num_query_groups
    if groups is not None and groups % tensor_parallel:
        # Upstream gathers the keys of fewer groups over the student's ranks, whatever ranks the model has.
        raise RecipeError(
            f"of the teacher: its model.num_query_groups={groups} is not a multiple of the {tensor_parallel} ranks "
            "that it is cut over; choose fewer"
        )


def _fill(
    chunks: list[torch.nn.Module], folder: str | None, model: ModelConfig, *, replicas: dist.ProcessGroup | None
) -> str | Path:
    """Fill a teacher with its last checkpoint or, if it names none, with its Hugging Face folder; return which one."""
    if folder is None:
        assert model.hf is not None, "check_teachers asks for one of them"
        try:
            load_start(model, chunks)
        except RecipeError as error:
            raise RecipeError(f"of the teacher: {error}") from error
        return model.hf
    iteration = everyone(checkpoint.latest_weights(folder))[0]
    if iteration is None:
        raise RecipeError(f"the teacher's checkpoint.save={folder} holds no checkpoint; name the folder of a run")
    checkpoint.load_weights(folder, iteration, chunks, model=model, replicas=replicas)
    return checkpoint.iteration_folder(folder, iteration)
