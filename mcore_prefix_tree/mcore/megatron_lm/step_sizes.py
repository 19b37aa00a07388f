"""Sizes of a job's steps, by Megatron-LM's own calculator of micro-batches: nothing here can disagree with it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import num_microbatches_calculator as calculator

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.mcore.megatron_lm.step_batches import StepSize


@contextmanager
def megatrons_calculator(args: argparse.Namespace) -> Iterator[None]:
    """Set up the calculator of a job from its validated arguments, before Megatron-LM does so itself.

    Raises:
        AssertionError, ValueError: Megatron's, for sizes that do not divide each other.
    """
    names = inspect.signature(calculator.init_num_microbatches_calculator).parameters
    calculator.init_num_microbatches_calculator(**{name: getattr(args, name) for name in names})
    try:
        yield
    finally:
        calculator.destroy_num_microbatches_calculator()


def current_size(args: argparse.Namespace) -> StepSize:
    """Return the size of the step that the calculator stands at."""
    return StepSize(
        micro_batches=calculator.get_num_microbatches(),
        micro_batch_size=args.micro_batch_size,
        dp_size=args.data_parallel_size,
    )


def size_at(args: argparse.Namespace, consumed: int) -> StepSize:
    """Move the calculator to so many consumed samples, and return the size of the step that begins there.

    Raises:
        AssertionError: Megatron's, for a size that ranks and micro-batches do not divide.
        ArgumentError: the step has no micro-batch, or too few for an interleaved pipeline.
    """
    calculator.update_num_microbatches(consumed, consistency_check=True)
    size = current_size(args)
    if size.micro_batches < 1:
        raise ArgumentError(
            f"the step after {consumed:,} samples has {calculator.get_current_global_batch_size()} samples, fewer than "
            f"one micro-batch of --micro-batch-size={size.micro_batch_size} on each of {size.dp_size} data-parallel "
            "ranks; lower --micro-batch-size, or raise the batch size"
        )
    _check_interleaved(args, size)
    return size


def evaluation_size(args: argparse.Namespace) -> StepSize:
    """Return the size that Megatron evaluates with: a step's, or since core_v0.18 that of separate arguments."""
    micro_batch_size = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    samples = getattr(args, "eval_global_batch_size", args.global_batch_size)
    return StepSize(
        micro_batches=samples // (micro_batch_size * args.data_parallel_size),
        micro_batch_size=micro_batch_size,
        dp_size=args.data_parallel_size,
    )


def check_sizes(args: argparse.Namespace) -> None:
    """Check the sizes of all steps and of evaluation, as :func:`size_at` does; the calculator is at the first step."""
    if args.prefix_tree_valid_data_path and args.eval_iters:
        _check_interleaved(args, evaluation_size(args))
    size_at(args, 0)
    consumed = steps = 0
    while not is_constant(args) and (steps < args.train_iters if args.train_iters else consumed < args.train_samples):
        consumed += size_at(args, consumed).samples
        steps += 1


def is_constant(args: argparse.Namespace) -> bool:
    """Return whether all steps have one size."""
    schedules = (getattr(args, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule"))
    return all(schedule is None for schedule in schedules)


def _check_interleaved(args: argparse.Namespace, size: StepSize) -> None:
    # Megatron asks this in its schedule, at the first step.
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    if group > size.micro_batches or 0 < size.micro_batches % group < stages:
        raise ArgumentError(
            f"a step has {size.micro_batches} micro-batches on each rank, but an interleaved pipeline of {stages} "
            f"stages takes them {group} at a time, and at least {stages} in the end; change --global-batch-size or "
            "--micro-batch-size"
        )
