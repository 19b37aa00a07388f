"""The checkpoint that Megatron-LM is about to load, and whether it has the head that the job needs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.training.checkpointing import checkpoint_exists, get_load_checkpoint_path_by_args

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.mcore.checkpoints.checkpoint import RELEASE
from mcore_prefix_tree.mcore.ranks import on_main_rank
from mcore_prefix_tree.mcore.seam.scalar_output_layer import CHECKPOINT_KEY


def checkpoint_of(args: argparse.Namespace, load_arg: str = "load") -> Path | None:
    """Return the folder of the checkpoint that an argument names, None without one; all ranks together."""
    if not checkpoint_exists(getattr(args, load_arg)):
        return None
    return Path(get_load_checkpoint_path_by_args(args, load_arg))


def head_starts_new(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint of a language model that the weights below a new scalar head are loaded from.

    Return None if no checkpoint is loaded, or one that has a scalar head; all ranks together.

    Raises:
        ArgumentError: the checkpoint has no scalar head, and more than its weights is loaded.
    """
    # As load_checkpoint: without a checkpoint in --load, only the weights of the other.
    load_arg = "load" if checkpoint_exists(args.load) else "pretrained_checkpoint"
    source = checkpoint_of(args, load_arg)
    if source is None or on_main_rank(partial(_has_scalar_head, source)):
        return None
    named = f"--{load_arg.replace('_', '-')} {getattr(args, load_arg)}"
    if args.prefix_tree_score is not None:
        raise ArgumentError(f"{named} holds a language model, without a scalar head to score with; name another")
    if load_arg == "load" and not args.finetune and source.name != RELEASE:
        raise ArgumentError(
            f"{named} holds a language model, and --prefix-tree-objective {args.prefix_tree_objective} trains a scalar "
            "head, which starts anew: name it with --pretrained-checkpoint, or add --finetune, to load only the "
            "weights"
        )
    return source


def _has_scalar_head(source: Path) -> bool:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(source)):
        raise ArgumentError(
            f"{source} is not of --ckpt-format torch_dist, the only format that shows whether a head is scalar; "
            "convert it with --ckpt-convert-format torch_dist"
        )
    return CHECKPOINT_KEY in dist_checkpointing.load_tensors_metadata(str(source))
