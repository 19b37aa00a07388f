"""The objective of a ``--prefix-tree`` job, and the second models that it asks.

Rules and readers of recipes apply to them: the arguments are converted to sections of a recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from mcore_prefix_tree.arguments.rules import NAMES, objective_section
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.teacher import Teacher
from mcore_prefix_tree.mcore.megatron_lm.vocabulary import vocab_size_of
from mcore_prefix_tree.mcore.models.teacher import check_teachers, load_teachers
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.recipe import BatchConfig, DataConfig, ModelConfig, ParallelConfig, Recipe
from mcore_prefix_tree.recipe.objective import objective_of as objective_of_recipe
from mcore_prefix_tree.recipe.objective import settings_of
from mcore_prefix_tree.recipe.teacher import check_stage, parallel_of_teachers, teacher_recipes


def objective_of(args: argparse.Namespace) -> Objective:
    """Return the objective that validated arguments name, with what it reads before any model is built.

    Raises:
        RecipeError, ValueError, OSError: an option, a tokenizer, a projection or a teacher's recipe cannot be used.
    """
    settings = settings_of(objective_section(args), NAMES)
    if not (settings.asks_model or settings.across_tokenizers):
        return settings
    recipe = _recipe_of(args)
    check_stage(args.data_parallel_size * args.tensor_model_parallel_size, recipe.objective, NAMES)
    parallel_of_teachers(recipe.objective, recipe.parallel, NAMES)
    objective = objective_of_recipe(recipe, NAMES)
    if objective.asks_model:
        check_teachers(
            teacher_recipes(recipe, NAMES),
            recipe.model,
            max_tokens=args.prefix_tree_max_tokens,
            across_tokenizers=objective.across_tokenizers,
            names=NAMES,
        )
    return objective


def teacher_of(args: argparse.Namespace, job: Job, order: SampleOrder, *, say: Callable[[str], None]) -> Teacher | None:
    """Return the second models of a job's objective, loaded; all ranks together. None if it asks none.

    Megatron-LM's loop has no place for another pipeline before a step's own, so all layers of a teacher are on the last
    stage, which alone asks it.

    Args:
        args: validated arguments.
        job: job that asks them.
        order: order in which steps take the samples; a teacher's ``attention_backend: auto`` looks at the first step.
        say: function that receives which weights they have, on every rank.

    Raises:
        RecipeError, NotImplementedError, ValueError: see :func:`load_teachers`.
    """
    if not (job.objective.asks_model or job.objective.across_tokenizers):
        return None
    recipe, vocab_size = _recipe_of(args), vocab_size_of(args)
    assert vocab_size is not None, "a dry run loads no teacher"
    return load_teachers(
        teacher_recipes(recipe, NAMES) if job.objective.asks_model else [],
        recipe,
        job,
        first_step=lambda: order.take(0, args.global_batch_size),
        vocab_size=vocab_size,
        padded_vocab_size=args.padded_vocab_size,
        say=say,
        on_last_stage=True,
        names=NAMES,
    )


def _recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the student that the arguments describe as a recipe, as far as its teachers depend on it."""
    return Recipe(
        data=DataConfig(
            path=args.prefix_tree_data_path,
            tokenizer=args.prefix_tree_tokenizer,
            chat_template_kwargs=args.prefix_tree_chat_template_kwargs or {},
        ),
        model=ModelConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            kv_channels=args.kv_channels,
            vocab_size=args.vocab_size,
            max_position_embeddings=args.max_position_embeddings,
            position_embedding_type=(
                "learned_absolute" if args.position_embedding_type == "learned_absolute" else "none"
            ),
            dtype="bfloat16" if args.bf16 else "float32",
            transformer_impl="transformer_engine" if args.transformer_impl == "transformer_engine" else "local",
        ),
        batch=BatchConfig(
            max_tokens=args.prefix_tree_max_tokens,
            global_batch_size=args.global_batch_size,
            share=args.prefix_tree_share,
            min_shared_tokens=args.prefix_tree_min_shared_tokens,
        ),
        train_iters=1,
        attention_backend=args.prefix_tree_attention_backend,
        deterministic_attention=args.prefix_tree_deterministic_attention,
        fused_head=args.prefix_tree_fused_head,
        device="cuda" if torch.cuda.is_available() else "cpu",
        objective=objective_section(args),
        parallel=ParallelConfig(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            sequence_parallel=args.sequence_parallel,
        ),
    )
