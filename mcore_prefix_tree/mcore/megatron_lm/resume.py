"""Check that a job which resumes has the samples that its checkpoint was trained on.

Megatron's checkpoints keep the arguments of the job; ``args.prefix_tree_samples`` records its samples.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.training import print_rank_0
from megatron.training.checkpointing import (
    checkpoint_exists,
    get_load_checkpoint_path_by_args,
    load_args_from_checkpoint,
)

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.fingerprint import CHECKSUMS, are_new_data, difference
from mcore_prefix_tree.mcore.checkpoints.checkpoint import RELEASE
from mcore_prefix_tree.mcore.checkpoints.integrity import read_metadata
from mcore_prefix_tree.mcore.ranks import everyone, on_main_rank
from mcore_prefix_tree.mcore.seam.scalar_output_layer import CHECKPOINT_KEY

# Settings that have to stay for an order of samples to continue where it stopped, with the user's names.
_SETTINGS = {
    "seed": "--seed",
    "order": "--prefix-tree-order",
    "step": "--global-batch-size",
    "samples_per_epoch": "--prefix-tree-data-path",
}


def consumed_before(args: argparse.Namespace, order: SampleOrder) -> int:
    """Return the number consumed before an order's first sample; all ranks together, after the checkpoint is loaded.

    Records the samples in ``args``, for the checkpoints of this job; ``consumed_train_samples`` are the checkpoint's.
    Raises ArgumentError if they were others, without ``--prefix-tree-new-data``, or if the job resumes before them.
    """
    now = {
        "seed": args.seed,
        "order": args.prefix_tree_order,
        "step": args.global_batch_size if args.prefix_tree_order == "folded" else None,  # its runs are a step long
        "samples_per_epoch": order.samples_per_epoch,
        "checksums": order.checksums,
    }
    consumed = 0
    if args.consumed_train_samples:
        before = _read_saved_record(args)
        # A run of stock Megatron does not say.
        other = None if before is None else difference(before, now)
        if other is not None and before is not None and not args.prefix_tree_new_data:
            raise ArgumentError(
                f"the checkpoint in --load {args.load} {_how_data_differ(other, before, now, args)}; the data would "
                f"not continue after its {args.consumed_train_samples:,} samples: change it back, or give "
                "--prefix-tree-new-data, to begin with the first of the data"
            )
        if args.prefix_tree_new_data and (before is None or are_new_data(before, now)):
            consumed = args.consumed_train_samples
            print_rank_0(f"> new data: their first sample follows the {consumed:,} of the checkpoint")
        elif before is not None:
            consumed = before["consumed_before"]
        if consumed > args.consumed_train_samples:
            # Since core_v0.18 an argument can set an iteration back.
            raise ArgumentError(
                f"the job continues after {args.consumed_train_samples:,} samples, but its data began after "
                f"{consumed:,}; remove --override-ckpt-iteration"
            )
    args.prefix_tree_samples = now | {"consumed_before": consumed}
    return consumed


def _read_saved_record(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the loaded checkpoint's record of its samples, as the first rank reads it."""
    # Megatron reads it once more, into a copy, and says which argument it takes from there.
    with contextlib.redirect_stdout(io.StringIO()):
        found = load_args_from_checkpoint(copy.copy(args))
    # It returns a pair only if there is a checkpoint with arguments.
    saved = found[1] if isinstance(found, tuple) else None
    before = getattr(saved, "prefix_tree_samples", None)
    if before is not None:
        before |= {"objective": getattr(saved, "prefix_tree_objective", "sft")}
    first: dict[str, Any] | None = everyone(before)[0]
    return first


def _how_data_differ(name: str, before: Mapping[str, Any], now: Mapping[str, Any], args: argparse.Namespace) -> str:
    if name != CHECKSUMS:
        return f"was trained with {name}={before[name]}, this job has {name}={now[name]} ({_SETTINGS[name]})"
    told = "was trained on as many samples as --prefix-tree-data-path gives, but not the same"
    if before["objective"] == args.prefix_tree_objective:
        return told
    # Objectives keep other samples in one record: groups, pairs, or none.
    return (
        f"{told}, or not in the same groups: its --prefix-tree-objective was {before['objective']}, and is "
        f"{args.prefix_tree_objective} now"
    )


def find_checkpoint(args: argparse.Namespace, load_arg: str = "load") -> Path | None:
    """Return the folder of the checkpoint that an argument names, None without one; all ranks together."""
    if not checkpoint_exists(getattr(args, load_arg)):
        return None
    return Path(get_load_checkpoint_path_by_args(args, load_arg))


def head_starts_new(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint of a language model that the weights below a new scalar head are loaded from.

    Return None if no checkpoint is loaded, or one that has a scalar head; all ranks together. Raises ArgumentError if
    more than the weights of a language model is loaded.
    """
    # As load_checkpoint: without a checkpoint in --load, only the weights of the other.
    load_arg = "load" if checkpoint_exists(args.load) else "pretrained_checkpoint"
    source = find_checkpoint(args, load_arg)
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
    return CHECKPOINT_KEY in read_metadata(source / ".metadata").state_dict_metadata
