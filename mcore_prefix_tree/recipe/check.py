"""Checks of a recipe by itself, which need neither torch nor megatron-core: a mistake is reported within a second.

Megatron-Core, the samples and the devices have the last word when the job starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from mcore_prefix_tree.attention.api import check_setting
from mcore_prefix_tree.data.files import resolve_paths
from mcore_prefix_tree.data.write import check_output
from mcore_prefix_tree.plan import LatentAttention
from mcore_prefix_tree.recipe.model import ModelConfig
from mcore_prefix_tree.recipe.objective import checked_settings
from mcore_prefix_tree.recipe.sections import LogConfig, OptimizerConfig, Recipe, RecipeError
from mcore_prefix_tree.versions import install_command


def check_recipe(recipe: Recipe, *, is_trained: bool = False) -> None:
    """Check settings that pass one by one, but not together, and names of what has to exist.

    Args:
        recipe: recipe of the job.
        is_trained: whether the job runs the optimizer.

    Raises:
        RecipeError: a setting cannot be used; names it.
        ValueError: the attention back-end does not exist.
        SampleError: a file of data does not exist.
    """
    check_setting(recipe.attention_backend)
    checked_settings(recipe)
    check_sizes(recipe.model)
    if is_trained:
        _check_schedule(recipe.optimizer, steps=recipe.train_iters, is_float64=recipe.model.dtype == "float64")
    resolve_paths(recipe.data.path)


def check_exported(recipe: Recipe, path: str | Path) -> str:
    """Check that a recipe's last checkpoint can be exported; return the folder of its checkpoints.

    Args:
        recipe: recipe of the job.
        path: path of the folder to make.

    Raises:
        RecipeError: ``model.hf`` or ``checkpoint.save`` is not set or names no folder, or see :func:`check_export`.
    """
    saved, source = recipe.checkpoint.save, recipe.model.hf
    if source is None or saved is None:
        raise RecipeError(
            f"export needs {'model.hf, whose format it writes' if source is None else 'checkpoint.save'}; set it"
        )
    check_saved(saved)
    check_export(path, f"PATH={path}")
    return saved


def check_scored(recipe: Recipe) -> None:
    """Check that a recipe names weights to score with.

    Raises:
        RecipeError: neither ``checkpoint.save`` nor ``model.hf`` is set, or see :func:`check_saved`.
    """
    if recipe.checkpoint.save is not None:
        check_saved(recipe.checkpoint.save)
    elif recipe.model.hf is None:
        raise RecipeError("scoring needs checkpoint.save, the folder of the checkpoints to score with")


def check_saved(folder: str) -> None:
    """Check that the folder of a run exists; a network folder may show other machines' files late to other ranks.

    Raises:
        RecipeError: it does not exist.
    """
    if os.environ.get("RANK", "0") == "0" and not os.path.isdir(folder):
        raise RecipeError(f"{folder} holds no checkpoint; train first, or name the folder of a run that did")


def check_export(path: str | Path, setting: str) -> None:
    """Check that a folder can be made, before there is anything to write; make its parent folder.

    Args:
        path: path of the folder.
        setting: option that names it, for messages.

    Raises:
        RecipeError: the folder exists, or cannot be made.
    """
    parent = Path(path).absolute().parent
    if os.path.lexists(path):
        raise RecipeError(f"{setting} exists already; name a folder that does not")
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{setting}: {parent} cannot be made: {error.strerror}") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RecipeError(f"{setting}: {parent} is not a folder that can be written to")


def check_logs(config: LogConfig, inputs: Iterable[str] = ()) -> None:
    """Check that what the logs need is installed, and that none replaces an input.

    Raises:
        ValueError: ``metrics`` is one of the inputs.
        ImportError: ``tensorboard`` or ``wandb`` is set and is not installed.
    """
    if config.metrics is not None and Path(config.metrics).exists():
        try:
            check_output(config.metrics, inputs)
        except ValueError as error:
            raise ValueError(f"log.metrics={error}") from None
    for package in ("tensorboard", "wandb"):
        given = getattr(config, package)
        if given is not None and not _is_installed(package):
            raise ImportError(f"log.{package}={given} needs {package}: {install_command(package)}, or leave it out")


def _is_installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder of that name, such as W&B's logs, is no package


def check_sizes(model: ModelConfig) -> None:
    """Check the sizes of a model that a recipe describes; of a Hugging Face folder, what is set beside it.

    Raises:
        RecipeError: a setting cannot be used; names it.
    """
    if model.hf is not None:
        return
    latent = LatentAttention.from_settings(model.transformer)
    _check_heads(model, has_latent_attention=latent is not None)
    if latent is None:
        _check_rotary_channels(model)
    else:
        _check_latent_attention(model, latent)


def _check_heads(model: ModelConfig, *, has_latent_attention: bool) -> None:
    if model.num_query_groups is not None and model.num_attention_heads % model.num_query_groups:
        raise RecipeError(
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"model.num_query_groups={model.num_query_groups}"
        )
    if not has_latent_attention and model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise RecipeError(
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={model.num_attention_heads}; change one of them, or set model.kv_channels"
        )


def _check_latent_attention(model: ModelConfig, sizes: LatentAttention) -> None:
    """Reject what multi-latent attention would take no notice of."""
    for name in ("num_query_groups", "kv_channels"):
        if getattr(model, name) is not None:
            raise RecipeError(
                f"model.{name} has no meaning with model.transformer.multi_latent_attention: its heads are "
                "model.num_attention_heads, of qk_head_dim, qk_pos_emb_head_dim and v_head_dim; leave it out"
            )
    others = (model.position_embedding_type != "rope", model.rope_scaling, model.yarn is not None)
    if any(others) or model.transformer.get("rope_type", "yarn") not in ("rope", "yarn"):
        raise RecipeError(
            "model.transformer.multi_latent_attention has rotary embeddings of its own: leave model.rope_scaling, "
            "model.yarn and model.position_embedding_type out and set model.transformer.rope_type, to rope or yarn"
        )
    if model.transformer.get("rope_type", "yarn") == "yarn" and model.rotary_percent != 1:
        raise RecipeError(
            "model.rotary_percent: YaRN turns all channels that have a position, which is what "
            "model.transformer.rope_type is by default; leave it out, or set model.transformer.rope_type=rope"
        )
    rotated = int(sizes.qk_pos_emb_head_dim * model.rotary_percent)
    if rotated == 0 or rotated % 2:
        raise RecipeError(
            f"rotary embeddings turn pairs of channels, but model.transformer.qk_pos_emb_head_dim and "
            f"model.rotary_percent leave {rotated}; change one of them"
        )


def _check_rotary_channels(model: ModelConfig) -> None:
    if (model.position_embedding_type == "yarn") != (model.yarn is not None):
        raise RecipeError(
            "model.position_embedding_type=yarn and model.yarn, which has its settings, come together; set "
            "model.yarn.rotary_scaling_factor and model.yarn.original_max_position_embeddings, or leave both out"
        )
    if model.yarn is not None and (model.rotary_percent != 1 or model.rope_scaling):
        raise RecipeError(
            "model.position_embedding_type=yarn turns all channels of a head and scales them in its own way: leave "
            "model.rotary_percent and model.rope_scaling out"
        )
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    rotated = int(head * model.rotary_percent)
    if model.position_embedding_type in ("rope", "yarn") and (rotated == 0 or rotated % 2):
        raise RecipeError(
            f"rotary embeddings turn pairs of channels, but of the {head} of each head model.rotary_percent="
            f"{model.rotary_percent:g} takes {rotated}; change it, model.kv_channels or model.position_embedding_type"
        )


def _check_schedule(options: OptimizerConfig, *, steps: int, is_float64: bool) -> None:
    if is_float64 and options.clip_grad > 0:
        raise RecipeError("optimizer.clip_grad: Megatron clips fp32 gradients; set it to 0 with model.dtype=float64")
    if is_float64 and options.use_distributed_optimizer:
        raise RecipeError("optimizer.use_distributed_optimizer: Megatron's takes no model.dtype=float64; turn it off")
    if options.lr_warmup_steps >= steps:
        raise RecipeError(
            f"optimizer.lr_warmup_steps={options.lr_warmup_steps} must be below train_iters={steps}; lower it, or set "
            "optimizer.lr_warmup_fraction"
        )
    if options.min_lr > options.lr:
        raise RecipeError(f"optimizer.min_lr={options.min_lr} is above optimizer.lr={options.lr}")
