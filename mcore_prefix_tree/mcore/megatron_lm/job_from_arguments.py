"""A job from Megatron-LM's arguments: objective, teachers, folding, back-end and the cost of its model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.training import get_tokenizer, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args

from mcore_prefix_tree.arguments.flags import read_objective, read_recipe
from mcore_prefix_tree.arguments.refusals import has_scalar_head
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.backend import resolve_backend
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job, StepHook
from mcore_prefix_tree.mcore.engine.resolve import Run
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import hybrid_pattern
from mcore_prefix_tree.mcore.teachers.load_teachers import HookLoader
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import ModelWork
from mcore_prefix_tree.plan.flops import DIMENSIONS
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings.bind_objective import make_bound_objective as objective_of_recipe
from mcore_prefix_tree.settings.bind_objective import make_settings
from mcore_prefix_tree.settings.teachers import check_asked_teachers, check_stage, parallel_of_teachers, teacher_recipes


def make_job_from_args(
    args: argparse.Namespace, objective: Objective, first_step: Callable[[], Sequence[Sample]]
) -> Job:
    """Return the job that validated arguments describe; see :meth:`Run.make_job`."""
    run = describe_run(args, device=device_of_this_rank())
    config = core_transformer_config_from_args(args)
    config.hybrid_layer_pattern = hybrid_pattern(args)  # Megatron gives it to the model alone
    job = run.make_job(objective, config, first_step, say=print_rank_0)
    # The stock loop divides its own loss by scored tokens, whatever layers add.
    return replace(job, divides_by_tokens=False) if objective.is_weighted_sum else job


def make_folding_from_args(
    args: argparse.Namespace, objective: Objective | None = None, *, device: torch.device
) -> Folding:
    """Return the folding that validated arguments describe; see :meth:`Run.make_folding`."""
    return describe_run(args, device=device).make_folding(objective)


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
        # In groups of another size, the micro-batches of a pass would leave a rest, too.
        runs_ahead=stages == 1 or (getattr(args, "prefix_tree_runs_ahead", False) and in_stages == interleaved),
    )


def count_model_work(args: argparse.Namespace) -> ModelWork:
    """Return the FLOPs of the model that the arguments describe."""
    scalar_head = has_scalar_head(args)
    return ModelWork.from_dimensions(
        **{name: getattr(args, name) for name in DIMENSIONS},
        vocab_size=1 if scalar_head else args.padded_vocab_size,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        swiglu=args.swiglu,
        fused_head=args.prefix_tree_fused_head and not scalar_head,
        settings=vars(args),
        pattern=hybrid_pattern(args),
    )


def resolve_backend_from_args(
    args: argparse.Namespace,
    config: Any,
    samples: Callable[[], Sequence[Sample]] = lambda: [Sample(tokens=[0])],
    *,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Return the job's back-end, for which ``auto`` looks at ``samples``; raise ValueError if it cannot run the job."""
    backend, deterministic = args.prefix_tree_attention_backend, args.prefix_tree_deterministic_attention
    device = device_of_this_rank()
    return resolve_backend(backend, config, samples, device=device, deterministic=deterministic, say=say)


def device_of_this_rank() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def vocab_size_without_padding(args: argparse.Namespace) -> int | None:
    """Return the number of tokens of the model's vocabulary; rows of the embedding from this id on are padding.

    Megatron-LM's tokenizer knows it: ``--vocab-size`` may lack the end-of-document token, and most tokenizers ignore
    it. A dry run builds no tokenizer; if its arguments do not set the size, this is ``--padded-vocab-size``.
    """
    padded: int | None = args.padded_vocab_size
    known: int | None = getattr(args, "prefix_tree_vocab_size", None)
    if known is None and not getattr(args, "prefix_tree_dry_run", False):
        known = max(args.vocab_size or 0, get_tokenizer().vocab_size)
    return padded if known is None or padded is None else min(known, padded)


def make_objective_from_args(args: argparse.Namespace) -> Objective:
    """Return the objective that validated arguments name, with its files read before any model is built."""
    settings = make_settings(read_objective(args))
    if settings.second_models is None:
        return settings
    recipe = read_recipe(args)
    check_stage(args.data_parallel_size * args.tensor_model_parallel_size, recipe.objective)
    parallel_of_teachers(recipe.objective, recipe.parallel)
    objective = objective_of_recipe(recipe)
    if settings.second_models.asked:
        check_asked_teachers(settings.second_models, teacher_recipes(recipe), recipe.model, recipe.batch.max_tokens)
    return objective


def load_hook(args: argparse.Namespace, job: Job, order: SampleOrder) -> StepHook:
    """Return the work of a job's objective before a step, for example by its teachers, loaded; all ranks together.

    Before core_v0.19, Megatron-LM's loop has no place for another pipeline before a step's own, so all layers of a
    teacher are on the last stage, and only that one asks it.
    """
    if job.objective.second_models is None:
        return job.hook
    vocab_size = vocab_size_without_padding(args)
    assert vocab_size is not None, "a dry run loads no teacher"
    loader = HookLoader(
        student=read_recipe(args),
        job=job,
        first_step=lambda: order.take(0, args.global_batch_size),
        vocab_size=vocab_size,
        padded_vocab_size=args.padded_vocab_size,
        say=print_rank_0,
        on_last_stage=True,
    )
    return loader.hook()
