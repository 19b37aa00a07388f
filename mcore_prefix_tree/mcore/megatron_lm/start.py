"""Start a ``pretrain_gpt`` job from this package's own entry: it trains, or writes ``--prefix-tree-score``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.training import print_rank_0
from megatron.training.checkpointing import load_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from mcore_prefix_tree.arguments.flags import SPELLINGS, read_objective, read_score
from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.cpu.emulation import enable_training
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.mcore import release
from mcore_prefix_tree.mcore.engine.score_files import ScoreReport, make_readouts, write_scores
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import config_in_provider
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import (
    make_job_from_args,
    make_objective_from_args,
    vocab_size_without_padding,
)
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import build_chunks, run_pretrain, start
from mcore_prefix_tree.mcore.megatron_lm.providers import (
    ReadingProgress,
    TreeDatasetsProvider,
    make_source_from_args,
    tree_forward_step,
    tree_model_provider,
)
from mcore_prefix_tree.mcore.megatron_lm.resume import find_checkpoint
from mcore_prefix_tree.settings.score_section import REFERENCE
from mcore_prefix_tree.utils.errors import naming_memory, spell

_REFERENCE_ARGUMENT = "prefix_tree_score_reference"


def run_score() -> None:
    """Score the data of the command line and write the scores, see :func:`write_scores`; all ranks together."""
    args = start()
    config_in_provider(args)
    # Only the weights: there is no optimizer, and no training continues.
    args.finetune = args.no_load_optim = args.no_load_rng = True
    options, kind = read_score(args), read_objective(args).kind
    assert options is not None, "only --prefix-tree-score starts this"
    names = FieldNames(given=args.prefix_tree_fields, format=args.prefix_tree_format, keeps_others=True)
    # The objective's fields are not checked: it may need these very scores.
    over_budget = args.prefix_tree_over_budget
    source = make_source_from_args(
        args, args.prefix_tree_data_path, "file", None, names=names, whole_samples=over_budget == "repeat"
    )
    order, skipped = source.read(progress=ReadingProgress(), is_scored=options.reads_mask(kind))
    job = make_job_from_args(args, make_objective_from_args(args), lambda: order.take(0, args.global_batch_size))
    models = {options.column(kind): _filled(args, "load")}
    if options.reference is not None:
        models[REFERENCE] = _filled(args, _REFERENCE_ARGUMENT)
    report = write_scores(
        args.prefix_tree_score,
        order,
        models,
        make_readouts(
            options, kind, vocab_size=vocab_size_without_padding(args), fused_head=args.prefix_tree_fused_head
        ),
        ScoreReport(
            iteration=_named(args, "load") or args.prefix_tree_hf,
            reference_iteration=_named(args, _REFERENCE_ARGUMENT),
            skipped=str(skipped) if skipped else "",
        ),
        per_step=args.global_batch_size,
        folding=replace(job.folding, over_budget=over_budget),
        names=FieldNames(given=args.prefix_tree_fields, format=args.prefix_tree_format),
        options=options,
    )
    print_rank_0(spell("\n".join(report.lines(args.prefix_tree_score)), SPELLINGS))
    dist.barrier()
    dist.destroy_process_group()


def _filled(args: argparse.Namespace, load_arg: str) -> list[Any]:
    """Return this rank's model chunks with the weights that an argument names."""
    chunks = build_chunks(tree_model_provider)
    folder = getattr(args, load_arg)
    if folder is None:  # the model provider has filled them from --prefix-tree-hf
        return chunks
    try:
        load_checkpoint(chunks, None, None, load_arg=load_arg)
    except (CheckpointingException, CheckpointException, RuntimeError) as error:
        raise ArgumentError(
            f"--{load_arg.replace('_', '-')} {folder} does not fit the model that the arguments describe: "
            f"{_first_line(error)}; give the arguments that it was trained with"
        ) from error
    return chunks


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own text is the tracebacks of all ranks
        error = next((failure for failure, _ in error.failures.values()), RuntimeError("another rank failed"))
    return str(error).strip().partition("\n")[0][:300].rstrip(".")


def _named(args: argparse.Namespace, load_arg: str) -> int | str | None:
    """Return the iteration of the checkpoint that an argument names, or ``release``; all ranks together."""
    source = find_checkpoint(args, load_arg)
    if source is None:
        return None
    return int(source.name.removeprefix("iter_")) if source.name.startswith("iter_") else source.name


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
    version = release.installed_version().partition("+")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version("megatron-core")
        if installed != version:
            say(f"megatron.core {version} of {root} is used, not the installed {installed}")


def run(root: Path) -> None:
    """Train with the ``pretrain`` of the checkout at ``root``, print a dry run, or score; exit with 2 for a bad job."""
    say_which_megatron_core(root)
    with naming_memory(lambda: "the job does not fit; lower --prefix-tree-max-tokens or the size of the model"):
        if any(word.partition("=")[0] == "--prefix-tree-score" for word in sys.argv[1:]):
            run_score()
            return
        data = TreeDatasetsProvider()
        run_pretrain(data, tree_model_provider, tree_forward_step, steps=data)
