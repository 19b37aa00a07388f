"""``--prefix-tree-score``: every sample's scores under a checkpoint of Megatron-LM, written as ``score`` does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.training import print_rank_0
from megatron.training.checkpointing import load_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from mcore_prefix_tree.arguments.flags import SPELLINGS
from mcore_prefix_tree.arguments.read_recipe import read_objective, read_score
from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.mcore.engine.score_files import ScoreReport, make_readouts, write_scores
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import config_in_provider
from mcore_prefix_tree.mcore.megatron_lm.build_model import tree_model_provider
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import make_job_from_args
from mcore_prefix_tree.mcore.megatron_lm.objective_from_arguments import make_objective_from_args
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import build_chunks, start
from mcore_prefix_tree.mcore.megatron_lm.providers import ReadingProgress, make_source_from_args
from mcore_prefix_tree.mcore.megatron_lm.resume import find_checkpoint
from mcore_prefix_tree.mcore.megatron_lm.unpadded_vocabulary import vocab_size_without_padding
from mcore_prefix_tree.settings.score_section import REFERENCE
from mcore_prefix_tree.utils.errors import spell

_REFERENCE_ARGUMENT = "prefix_tree_score_reference"


def run_score(*, args_defaults: Mapping[str, Any]) -> None:
    """Score the data of the command line and write the scores; all ranks together.

    Raises:
        ArgumentError: a checkpoint does not fit the model.
        SampleError, ScoreError, OSError: see :func:`write_scores`.
    """
    args = start(args_defaults=args_defaults)
    config_in_provider(args)
    # Only the weights: there is no optimizer, and no training continues.
    args.finetune = args.no_load_optim = args.no_load_rng = True
    options, kind = read_score(args), read_objective(args).kind
    assert options is not None, "only --prefix-tree-score starts this"
    names = FieldNames(given=args.prefix_tree_fields, keeps_others=True)
    # The objective's fields are not checked: it may need these very scores.
    source = make_source_from_args(args, args.prefix_tree_data_path, "file", None, names=names)
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
        folding=job.folding,
        names=FieldNames(given=args.prefix_tree_fields),
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
