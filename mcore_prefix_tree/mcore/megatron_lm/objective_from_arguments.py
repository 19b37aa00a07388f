"""The objective of a ``--prefix-tree`` job, and the second models that it asks.

Rules and readers of recipes apply to them: the arguments are converted to sections of a recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mcore_prefix_tree.arguments.read_recipe import read_objective, read_recipe
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.step_hook import StepHook
from mcore_prefix_tree.mcore.megatron_lm.unpadded_vocabulary import vocab_size_without_padding
from mcore_prefix_tree.mcore.teachers.load_teachers import HookLoader
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.settings.bind_objective import make_bound_objective as objective_of_recipe
from mcore_prefix_tree.settings.bind_objective import make_settings
from mcore_prefix_tree.settings.teachers import check_asked_teachers, check_stage, parallel_of_teachers, teacher_recipes


def make_objective_from_args(args: argparse.Namespace) -> Objective:
    """Return the objective that validated arguments name, with its files read before any model is built.

    Raises:
        RecipeError, ValueError, OSError: an option, a tokenizer, a projection or a teacher's recipe cannot be used.
    """
    settings = make_settings(read_objective(args))
    if settings.second_models is None:
        return settings
    recipe = read_recipe(args)
    check_stage(args.data_parallel_size * args.tensor_model_parallel_size, recipe.objective)
    parallel_of_teachers(recipe.objective, recipe.parallel)
    objective = objective_of_recipe(recipe)
    if settings.second_models.asked:
        check_asked_teachers(settings.second_models, teacher_recipes(recipe), recipe.model, recipe.batch.max_tokens)
    return objective


def load_hook(args: argparse.Namespace, job: Job, order: SampleOrder, *, say: Callable[[str], None]) -> StepHook:
    """Return the work of a job's objective before a step, for example by its teachers, loaded; all ranks together.

    Megatron-LM's loop has no place for another pipeline before a step's own, so all layers of a teacher are on the last
    stage, and only that one asks it. A teacher's ``attention_backend: auto`` looks at the first step of ``order``;
    ``say`` receives which weights are loaded, on every rank.

    Raises:
        RecipeError, NotImplementedError, ValueError: see :meth:`HookLoader.hook`.
    """
    if job.objective.second_models is None:
        return job.hook
    recipe, vocab_size = read_recipe(args), vocab_size_without_padding(args)
    assert vocab_size is not None, "a dry run loads no teacher"
    loader = HookLoader(
        student=recipe,
        job=job,
        first_step=lambda: order.take(0, args.global_batch_size),
        vocab_size=vocab_size,
        padded_vocab_size=args.padded_vocab_size,
        say=say,
        on_last_stage=True,
    )
    return loader.hook()
