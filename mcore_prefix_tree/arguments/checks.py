"""Checks of the files, checkpoints, vocabulary, layers and lengths that arguments name."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data import resolve_paths
from mcore_prefix_tree.utils.inputs import check_folder_files

SPEC_EXAMPLE = "for example --spec mcore_prefix_tree.mcore.seam.layer_specs gpt_layer_local"
APEX_MISSING = (
    "--no-gradient-accumulation-fusion is missing: Megatron-LM's default needs NVIDIA Apex, whose extension "
    "fused_weight_gradient_mlp_cuda is not installed; give the flag, or build https://github.com/NVIDIA/apex with its "
    "CUDA extensions"
)
_CHECKPOINT = re.compile(r"iter_\d{7,}|release")


def check_checkpoints(args: argparse.Namespace) -> None:
    """Raise OSError for a pipe, a socket or a device in a checkpoint's folder: Megatron-LM would wait for ever."""
    for name in ("load", "pretrained_checkpoint"):
        folder = getattr(args, name, None)
        if folder is None or not os.path.isdir(folder):
            continue
        check_folder_files(folder)
        for checkpoint in (entry for entry in os.scandir(folder) if _CHECKPOINT.fullmatch(entry.name)):
            if checkpoint.is_dir():
                check_folder_files(checkpoint)


def check_checkpoint_args(args: argparse.Namespace) -> None:
    """Reject arguments that need the model before ``--use-checkpoint-args`` has read it; raises ArgumentError."""
    if args.use_checkpoint_args and args.prefix_tree_hf is not None:
        raise ArgumentError("--use-checkpoint-args and --prefix-tree-hf both decide the model; give only one of them")
    if args.use_checkpoint_args and args.prefix_tree_dry_run:
        raise ArgumentError("--prefix-tree-dry-run does not read --use-checkpoint-args; give the model's arguments")


def check_launched(environment: Mapping[str, str]) -> None:
    """Check that a launcher started this rank; raises ArgumentError if ``MASTER_ADDR`` is not set."""
    if "MASTER_ADDR" not in environment:
        raise ArgumentError("MASTER_ADDR is not set: start the job with torchrun, or with a launcher that sets it")


def check_extensions(args: argparse.Namespace) -> None:
    """Raise ArgumentError if Apex is missing, which Megatron-LM's default for gradients needs."""
    if args.gradient_accumulation_fusion and find_spec("fused_weight_gradient_mlp_cuda") is None:
        raise ArgumentError(APEX_MISSING)


def check_data(args: argparse.Namespace) -> None:
    """Raise SampleError if a file of samples is missing, or a glob matches none."""
    resolve_paths([*(args.prefix_tree_data_path or ()), *(args.prefix_tree_valid_data_path or ())])


def check_vocabulary_known(args: argparse.Namespace) -> None:
    """Raise ArgumentError if no argument sets the vocabulary."""
    if args.use_checkpoint_args:
        return
    names = ("prefix_tree_tokenizer", "prefix_tree_hf", "tokenizer_type", "vocab_size", "padded_vocab_size")
    if all(getattr(args, name) is None for name in names):
        raise ArgumentError(
            "the vocabulary is not known: give --prefix-tree-tokenizer, --vocab-size, or Megatron's --tokenizer-type"
        )


def check_spec_named(spec: Sequence[str]) -> None:
    """Raise ArgumentError unless ``--spec`` is an installed module and a name in it; import neither."""
    words = " ".join(spec)
    if len(spec) != 2:
        raise ArgumentError(f"--spec {words}: give a module and the name of a spec in it; {SPEC_EXAMPLE}")
    package = spec[0].partition(".")[0]
    if package not in sys.modules and (not package or find_spec(package) is None):
        raise ArgumentError(f"--spec {words}: there is no module {package}; {SPEC_EXAMPLE}")
