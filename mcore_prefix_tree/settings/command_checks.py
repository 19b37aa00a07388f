"""Checks of a recipe that a command adds to the rules of its sections.

Neither torch nor megatron-core is imported: a mistake is reported within a second. Megatron-Core, the samples and the
devices have the last word when the job starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mcore_prefix_tree.data.chat import check_tokenizer_named
from mcore_prefix_tree.data.files import resolve_paths
from mcore_prefix_tree.data.write import check_output
from mcore_prefix_tree.settings.bind_objective import make_settings
from mcore_prefix_tree.settings.hf_folder import CONFIG, HuggingFaceFolder
from mcore_prefix_tree.settings.load import load_recipe
from mcore_prefix_tree.settings.sample_source import check_units
from mcore_prefix_tree.settings.section import collect_faults
from mcore_prefix_tree.settings.sections import ObjectiveConfig, RecipeError
from mcore_prefix_tree.settings.teachers import (
    check_asked_teachers,
    list_teacher_inputs,
    parallel_of_teachers,
    teacher_recipes,
)
from mcore_prefix_tree.utils.errors import naming
from mcore_prefix_tree.utils.inputs import local_path
from mcore_prefix_tree.utils.ranks import is_first_rank
from mcore_prefix_tree.utils.versions import install_command

# Work of a command on a recipe, which decides what is checked of it.
Task = Literal["verify", "measure", "train", "score", "export", "export teacher"]
# Of a recipe whose model runs on the samples.
_SAMPLES: tuple[Callable[[Any], object], ...] = (
    lambda recipe: parallel_of_teachers(recipe.objective, recipe.parallel),
    lambda recipe: recipe.padding,
    lambda recipe: check_units(make_settings(recipe.objective), recipe.batch, recipe.objective),
    lambda recipe: _refuse(
        recipe.data.tokenizer is None and bool(recipe.data.chat_template_kwargs),
        "data.chat_template_kwargs needs data.tokenizer, whose template reads them; set both, or none",
    ),
    lambda recipe: _refuse(
        recipe.data.tokenizer is None and recipe.model.vocab_size is None and recipe.model.hf is None,
        "model.vocab_size is missing; set it, or name a data.tokenizer to take it from",
    ),
    lambda recipe: _check_teachers(recipe.objective, across_tokenizers=True),
    lambda recipe: _check_tokenizer(recipe.data.tokenizer, recipe.data.chat_template_kwargs),
    lambda recipe: resolve_paths(recipe.data.path),
)
# Of one whose optimizer runs too.
_STEPS: tuple[Callable[[Any], object], ...] = (
    lambda recipe: _refuse(
        recipe.model.dtype == "float64" and recipe.optimizer.clip_grad > 0,
        "optimizer.clip_grad: Megatron clips fp32 gradients; set it to 0 with model.dtype=float64",
    ),
    lambda recipe: _refuse(
        recipe.model.dtype == "float64" and recipe.optimizer.use_distributed_optimizer,
        "optimizer.use_distributed_optimizer: Megatron's takes no model.dtype=float64; turn it off",
    ),
    lambda recipe: _refuse(
        recipe.optimizer.lr_warmup_steps >= recipe.train_iters,
        f"optimizer.lr_warmup_steps={recipe.optimizer.lr_warmup_steps} must be below train_iters={recipe.train_iters}; "
        "lower it, or set optimizer.lr_warmup_fraction",
    ),
    lambda recipe: _refuse(
        recipe.optimizer.min_lr > recipe.optimizer.lr,
        f"optimizer.min_lr={recipe.optimizer.min_lr} is above optimizer.lr={recipe.optimizer.lr}",
    ),
    *_SAMPLES,
)
CHECKS: Mapping[Task, tuple[Callable[[Any], object], ...]] = {
    "verify": _SAMPLES,
    "measure": _STEPS,
    "train": (
        *_STEPS,
        lambda recipe: _check_teachers(recipe.objective, across_tokenizers=False),
        lambda recipe: _check_asked_teachers(recipe),
        lambda recipe: recipe.validation.path is None or resolve_paths(recipe.validation.path),
        lambda recipe: check_metrics(recipe.log.metrics, recipe.inputs + list_teacher_inputs(recipe.objective)),
        lambda recipe: _check_package("tensorboard", recipe.log.tensorboard),
        lambda recipe: _check_package("wandb", recipe.log.wandb),
        lambda recipe: check_new(recipe.checkpoint.export_hf, f"checkpoint.export_hf={recipe.checkpoint.export_hf}"),
    ),
    "score": (
        *_SAMPLES,
        lambda recipe: _refuse(
            recipe.checkpoint.save is None and recipe.model.hf is None,
            "scoring needs checkpoint.save, the folder of the checkpoints to score with",
        ),
        lambda recipe: _check_saved(recipe.checkpoint.save),
    ),
    "export": (
        lambda recipe: _refuse(recipe.model.hf is None, "export needs model.hf, whose format it writes; set it"),
        lambda recipe: _refuse(recipe.checkpoint.save is None, "export needs checkpoint.save; set it"),
        lambda recipe: _check_saved(recipe.checkpoint.save),
    ),
    "export teacher": (lambda recipe: resolve_paths(recipe.data.path),),
}


def check_new(path: str | Path | None, setting: str) -> None:
    """Check that a folder that a setting names, to be made, does not exist."""
    is_there = path is not None and os.path.lexists(path)
    _refuse(is_there, f"{setting} exists already; name a folder that does not")


def _check_teachers(section: ObjectiveConfig, *, across_tokenizers: bool) -> None:
    needed = make_settings(section).second_models
    if needed is None or needed.same_vocabulary == across_tokenizers:
        return
    faults = collect_faults(partial(_check_teacher, path) for path in section.teacher_recipes)
    if faults:
        raise RecipeError("; ".join(faults))


def _check_asked_teachers(recipe: Any) -> None:
    needed = make_settings(recipe.objective).second_models
    is_readable = not collect_faults(partial(_check_teacher, path) for path in recipe.objective.teacher_recipes)
    if needed is not None and needed.asked and is_readable:  # others are reported already
        check_asked_teachers(needed, teacher_recipes(recipe), recipe.model, recipe.batch.max_tokens)


def _check_teacher(path: str) -> None:
    if not (Path(path) / CONFIG).is_file():
        load_recipe(path)
        return
    with naming("objective.teacher_recipe: ", RecipeError):
        HuggingFaceFolder.read(path)


def _check_tokenizer(name: str | None, chat_template_kwargs: Mapping[str, Any]) -> None:
    if name is not None:
        check_tokenizer_named(local_path(name), chat_template_kwargs)


def _check_saved(folder: str | None) -> None:
    # A network folder may show other machines' files late to other ranks.
    is_missing = folder is not None and is_first_rank() and not os.path.isdir(folder)
    _refuse(is_missing, f"{folder} holds no checkpoint; train first, or name the folder of a run that did")


def _refuse(is_wrong: bool, sentence: str) -> None:
    if is_wrong:
        raise RecipeError(sentence)


def check_metrics(path: str | None, inputs: Collection[str]) -> None:
    """Check that ``log.metrics`` replaces no file that a command reads; raises RecipeError."""
    if path is not None and Path(path).exists():
        with naming("log.metrics=", RecipeError):
            check_output(path, inputs)


def _check_package(name: str, value: str | None) -> None:
    spec = None if value is None else find_spec(name)
    # A folder of that name, for example W&B's logs, is no package.
    if value is not None and (spec is None or spec.origin is None):
        raise ImportError(f"log.{name}={value} needs {name}: {install_command(name)}, or unset it")
