"""Start a ``pretrain_gpt`` job from this package's own entry."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from pathlib import Path

import torch

from mcore_prefix_tree.cpu.emulation import enable_training
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.megatron_lm.build_model import tree_model_provider
from mcore_prefix_tree.mcore.megatron_lm.loop_forward_step import tree_forward_step
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import run_pretrain
from mcore_prefix_tree.mcore.megatron_lm.providers import TreeDatasetsProvider
from mcore_prefix_tree.mcore.megatron_lm.score_checkpoint import run_score
from mcore_prefix_tree.utils.errors import naming_memory


def say(text: str) -> None:
    """Print one line, from one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"mcore_prefix_tree: {text}", flush=True)


def emulate_without_gpu(*, dry_run: bool = False) -> None:
    """Let Megatron run on the CPU of a machine without a GPU; a dry run uses it only to check arguments."""
    if not torch.cuda.is_available():
        enable_training()
        if not dry_run:
            say(
                "no GPU here, Megatron runs on the CPU under emulation; it needs --distributed-backend gloo "
                "--transformer-impl local --use-cpu-initialization and its --no-...-fusion flags"
            )


def say_which_megatron_core(root: Path) -> None:
    """Print one line if the checkout's ``megatron.core`` is not the one that pip installed."""
    version = compat.installed_version().partition("+")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version("megatron-core")
        if installed != version:
            say(f"megatron.core {version} of {root} is used, not the installed {installed}")


def run(root: Path) -> None:
    """Train with the ``pretrain`` of the checkout at ``root``, which checks the job; or print a dry run, or score.

    Raises:
        SystemExit: status 2, with one sentence, for a job that cannot run; 0 after a dry run.
    """
    say_which_megatron_core(root)
    with naming_memory(lambda: "the job does not fit; lower --prefix-tree-max-tokens or the size of the model"):
        if any(word.partition("=")[0] == "--prefix-tree-score" for word in sys.argv[1:]):
            run_score(args_defaults={})
            return
        datasets = TreeDatasetsProvider()
        run_pretrain(datasets, tree_model_provider, tree_forward_step, args_defaults={}, list_sizes=datasets.list_sizes)
