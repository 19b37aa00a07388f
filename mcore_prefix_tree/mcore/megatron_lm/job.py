"""A job from Megatron-LM's arguments: its folding, its back-end and the cost of its model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import print_rank_0
from megatron.training.arguments import core_transformer_config_from_args

from mcore_prefix_tree.arguments.named import padding_of
from mcore_prefix_tree.arguments.rules import has_scalar_head
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.backend import cases_of, resolve_backend
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.megatron_lm.pattern import hybrid_pattern
from mcore_prefix_tree.mcore.seam.hybrid import parts_of
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import CostModel, ModelWork
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import Sharing


def job_of(args: argparse.Namespace, folding: Folding, objective: Objective, order: SampleOrder) -> Job:
    """Return the job that validated arguments describe, the same on every rank and after a restart.

    Args:
        args: Megatron-LM's arguments.
        folding: folding that :func:`folding_of` returned.
        objective: objective of the job.
        order: order in which steps take the samples; ``--prefix-tree-attention-backend auto`` looks at the first step.

    Raises:
        ValueError: the back-end does not support the run; the message names those that do.
    """
    config = core_transformer_config_from_args(args)
    backend = _backend_of(
        args, config, lambda: order.take(0, args.global_batch_size), device=folding.device, say=print_rank_0
    )
    cases = cases_of(config, device=folding.device, deterministic=args.prefix_tree_deterministic_attention)
    return Job(
        objective=objective,
        folding=replace(folding, attention_backend=backend, attention_cases=cases),
        dp_rank=parallel_state.get_data_parallel_rank(),
        config=config,
        work=work_of(args),
        is_local=args.transformer_impl == "local",
        fused_head=args.prefix_tree_fused_head,
    )


def folding_of(args: argparse.Namespace, *, device: torch.device) -> Folding:
    """Return the folding of a job with these validated arguments.

    Raises:
        ArgumentError: the length buckets fit neither the budget nor the parallel layout.
    """
    stages, interleaved = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size is not None
    # Groups of another size may leave a rest of micro-batches, which Megatron checks.
    in_stages = interleaved and (args.microbatch_group_size_per_vp_stage or stages) == stages
    return Folding(
        max_tokens=args.prefix_tree_max_tokens,
        budget_name="--prefix-tree-max-tokens",
        dp_size=args.data_parallel_size,
        cost_model=CostModel.from_work(work_of(args)),
        device=device,
        micro_batch_multiple=stages if in_stages else 1,
        bubble=(stages - 1) / (args.virtual_pipeline_model_parallel_size or 1),
        sharing=Sharing(share=args.prefix_tree_share, min_shared_tokens=args.prefix_tree_min_shared_tokens),
        padding=padding_of(args, multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1),
        attention_backend=args.prefix_tree_attention_backend,
        deterministic_attention=args.prefix_tree_deterministic_attention,
        only_supervised=args.prefix_tree_fused_head,
    )


def work_of(args: argparse.Namespace) -> ModelWork:
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
        parts=parts_of(hybrid_pattern(args)),
    )


def check_backend(args: argparse.Namespace, config: Any) -> None:
    """Refuse a back-end that does not support the job, before there is a model or data; ``auto`` has to find one.

    Args:
        args: validated arguments.
        config: ``TransformerConfig`` of these arguments.

    Raises:
        ValueError: the back-end does not support the run; the message names those that do.
    """
    _backend_of(args, config, lambda: [Sample(tokens=[0])], device=device_of_this_rank(), say=lambda text: None)


def _backend_of(
    args: argparse.Namespace,
    config: Any,
    first_step: Callable[[], Sequence[Sample]],
    *,
    device: torch.device,
    say: Callable[[str], None],
) -> str:
    return resolve_backend(
        args.prefix_tree_attention_backend,
        config,
        first_step,
        device=device,
        deterministic=args.prefix_tree_deterministic_attention,
        any_order="--prefix-tree-no-deterministic-attention",
        say=say,
    )


def device_of_this_rank() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
