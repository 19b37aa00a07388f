"""A job from Megatron-LM's arguments: its folding, its back-end and the cost of its model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.training import print_rank_0
from megatron.training.arguments import core_transformer_config_from_args

from mcore_prefix_tree.arguments.read_recipe import read_recipe
from mcore_prefix_tree.arguments.refusals import has_scalar_head
from mcore_prefix_tree.mcore.engine.backend import resolve_backend
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.resolve import Run
from mcore_prefix_tree.mcore.megatron_lm.layer_pattern import hybrid_pattern
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import ModelWork
from mcore_prefix_tree.plan.model_shape import layer_parts
from mcore_prefix_tree.sample import Sample


def make_job_from_args(
    args: argparse.Namespace, objective: Objective, first_step: Callable[[], Sequence[Sample]]
) -> Job:
    """Return the job that validated arguments describe; see :meth:`Run.make_job`."""
    run = describe_run(args, device=device_of_this_rank())
    return run.make_job(objective, core_transformer_config_from_args(args), first_step, say=print_rank_0)


def make_folding_from_args(
    args: argparse.Namespace, objective: Objective | None = None, *, device: torch.device
) -> Folding:
    """Return the folding that validated arguments describe; see :meth:`Run.make_folding`."""
    config = None if objective is None else core_transformer_config_from_args(args)
    return describe_run(args, device=device).make_folding(objective, config)


def describe_run(args: argparse.Namespace, *, device: torch.device) -> Run:
    """Return the settings of validated arguments, and Megatron-LM's ranks and model."""
    stages, interleaved = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size is not None
    # Groups of another size may leave a rest of micro-batches, which Megatron checks.
    in_stages = interleaved and (args.microbatch_group_size_per_vp_stage or stages) == stages
    return Run(
        settings=read_recipe(args),
        device=device,
        dp_size=args.data_parallel_size,
        work=count_model_work(args),
        micro_batch_multiple=stages if in_stages else 1,
        pattern=hybrid_pattern(args),
        runs_ahead=stages == 1,
    )


def count_model_work(args: argparse.Namespace) -> ModelWork:
    """Return the FLOPs of the model that the arguments describe."""
    scalar_head = has_scalar_head(args)
    return ModelWork.from_dimensions(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        vocab_size=1 if scalar_head else args.padded_vocab_size,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        swiglu=args.swiglu,
        fused_head=args.prefix_tree_fused_head and not scalar_head,
        settings=vars(args),
        parts=layer_parts(hybrid_pattern(args)),
    )


def check_backend(args: argparse.Namespace, config: Any) -> None:
    """Raise ValueError if the job's back-end does not support it, or ``auto`` finds none, before a model is built."""
    resolve_backend(
        args.prefix_tree_attention_backend,
        config,
        lambda: [Sample(tokens=[0])],
        device=device_of_this_rank(),
        deterministic=args.prefix_tree_deterministic_attention,
        say=lambda text: None,
    )


def device_of_this_rank() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
