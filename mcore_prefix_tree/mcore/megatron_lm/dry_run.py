"""``--prefix-tree-dry-run``: the first step's plan, without a GPU and without a job.

It also finds ``--micro-batch-size`` and ``--seq-length`` in the data if they are omitted. ``--prefix-tree-max-tokens``
fills a GPU; how many samples fit it depends on the prefixes that they share. So the right ``--micro-batch-size`` is the
largest that every step fits. ``--seq-length`` bounds the longest sample, and Megatron-LM warms its fused functions up
on ``--seq-length`` times ``--micro-batch-size`` tokens: with the longest sample this stays small.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import (
    count_model_work,
    make_folding_from_args,
    make_objective_from_args,
)
from mcore_prefix_tree.mcore.megatron_lm.providers import read_order
from mcore_prefix_tree.mcore.megatron_lm.step_batches import (
    Need,
    check_steps,
    evaluation_size,
    megatrons_calculator,
    size_at,
)
from mcore_prefix_tree.plan import ForestPlan
from mcore_prefix_tree.sample import Sample

GIB = 1024**3
# Begins the line that recipes/launch/job.sh reads.
DECIDED = "sizes that the data decides: "
_NAMED = 8  # ranks that one line names
_FOUND = ("micro_batch_size", "seq_length")  # arguments that the data decides


def dry_run(args: argparse.Namespace, omitted: frozenset[str] = frozenset()) -> str:
    """Describe the first step of a job with these arguments.

    The first line gives the sizes in ``omitted`` (:func:`fill_omitted`). Raises ArgumentError if a step does not fit
    its micro-batches, SampleError for bad data.
    """
    objective = make_objective_from_args(args)
    folding = make_folding_from_args(args, objective, device=torch.device("cpu"))
    order = read_order(args, objective, folding)
    end = args.train_samples or (args.train_iters or 0) * args.global_batch_size or order.samples_per_epoch
    with megatrons_calculator(args):
        training = check_steps(order, lambda start: size_at(args, start), folding, objective, end=end)
    orders, evaluation = [order], []
    if args.prefix_tree_valid_data_path and args.eval_iters:
        orders.append(read_order(args, objective, folding, validates=True))
        evaluated, interval = evaluation_size(args), args.eval_interval or end
        # Since core_v0.19 the first ones may be skipped.
        left_out = (getattr(args, "start_eval_at_iter", None) or 0) // interval
        steps = (1 + end // args.global_batch_size // interval - left_out) * args.eval_iters
        evaluation = check_steps(orders[1], lambda _: evaluated, folding, objective, end=steps * evaluated.samples)
    # Evaluation takes training's size, unless its own is set.
    apart = "micro_batch_size" in omitted and "eval_micro_batch_size" not in omitted
    largest = largest_micro_batch_size(
        training if apart else [*training, *evaluation],
        stages=args.pipeline_model_parallel_size,
        multiple=folding.micro_batch_multiple,
    )
    lines = []
    if omitted:
        lines.append(DECIDED + settle(args, omitted, orders, micro_batch_size=largest))
    with megatrons_calculator(args):
        size = size_at(args, 0)
    samples = order.take(0, size.samples)
    plan = folding.plan(samples, micro_batches=size.micro_batches, together=objective.together(samples))
    lines += _describe_step(args, order, samples, plan, folding)
    if largest > args.micro_batch_size:
        lines.append(
            f"  fewer and larger micro-batches, {training[0].samples // largest} a rank here, fit every step: use "
            f"--micro-batch-size {largest}"
        )
    return "\n".join(lines)


def _describe_step(
    args: argparse.Namespace, order: SampleOrder, samples: Sequence[Sample], plan: ForestPlan, folding: Folding
) -> list[str]:
    """Describe the work of the first step, its expected speed-up and each rank's part."""
    logical = sum(map(len, samples))
    physical = sum(map(sum, plan.physical_tokens))
    # Once per tree, however many chunks it has.
    cuts = dict.fromkeys(batch for rank in plan.micro_batches for batch in rank)
    layouts = [folding.layout([samples[index] for index in batch]) for batch in cuts]
    lines = [
        f"{order.samples_per_epoch} samples an epoch, {len(samples)} a step, in {plan.num_micro_batches} micro-batches "
        f"on each of {len(plan.micro_batches)} data-parallel ranks",
        f"first step: {logical} logical tokens, {physical} physical, fold ratio {logical / physical:.2f}",
        f"first step: expected speed-up {count_model_work(args).expected_speedup(layouts)}",
    ]
    if len(samples) > order.samples_per_epoch:
        lines.append(
            f"first step: takes the {order.samples_per_epoch} samples there are more than once; its fold ratio counts "
            "the repeats, which other samples would not give"
        )
    lines += [
        f"  data-parallel rank {rank}: {_dealt(batches, sizes)}"
        for rank, (batches, sizes) in enumerate(zip(plan.micro_batches, plan.physical_tokens, strict=True))
    ]
    if plan.carrying is not None:
        passes = sum(run.forward_only for run in plan.carrying[0].runs)
        lines.append(
            f"first step: {plan.carried_tokens} tokens run forward once more, in {passes} of the micro-batches of each "
            "rank, and chunks of trees above the budget read their keys and values"
        )
    if plan.scored_tokens:
        lines.append(f"first step: {plan.scored_tokens} tokens run forward before it, for a loss of whole samples")
    return [*lines, *_idle(plan), f"first step: {_filled(plan, folding.max_tokens)}"]


def _dealt(batches: Sequence[Sequence[int]], sizes: Sequence[int]) -> str:
    """Describe a rank's micro-batches; those that a plan leaves empty are counted."""
    parts = [f"{len(batch)} samples in {tokens} tokens" for batch, tokens in zip(batches, sizes, strict=True) if tokens]
    empty = sum(not len(batch) for batch in batches)
    return ", ".join(parts + [f"{empty} empty"] * bool(empty))


def _idle(plan: ForestPlan) -> list[str]:
    """Name the data-parallel ranks of a plan that have no work, and the way out."""
    idle = [str(rank) for rank, batches in enumerate(plan.micro_batches) if not any(batches)]
    if not idle:
        return []
    named = ", ".join([*idle[:_NAMED], *([f"{len(idle) - _NAMED} more"] if len(idle) > _NAMED else [])])
    return [
        f"  {len(idle)} of {len(plan.micro_batches)} data-parallel ranks have no work ({named}): use fewer ranks, or "
        "raise --global-batch-size"
    ]


def _filled(plan: ForestPlan, max_tokens: int) -> str:
    """Describe how much of the budget the micro-batches of a plan use; those without samples are named."""
    sizes = [tokens for rank in plan.physical_tokens for tokens in rank]
    empty = sum(not batch for rank in plan.micro_batches for batch in rank)
    share = sum(sizes) / max(1, sum(map(bool, sizes))) / max_tokens
    text = f"micro-batches with samples use {share:.0%} of --prefix-tree-max-tokens={max_tokens} on average"
    return text + (f"; {empty} of {len(sizes)} are empty" if empty else "")


def fill_omitted(args: argparse.Namespace, args_defaults: Mapping[str, Any] | None) -> frozenset[str]:
    """Fill sizes that a dry run has to find, so that Megatron can validate the rest; return their names.

    Omitted ones become the smallest micro-batch and the longest sample allowed. ``args_defaults`` is None if unknown.
    """
    found = frozenset(name for name in _FOUND if vars(args)[name] is None and not (args_defaults or {}).get(name))
    if getattr(args, "encoder_seq_length", None) is not None:  # another name for it
        found -= {"seq_length"}
    if "micro_batch_size" in found:
        if args.global_batch_size is None:
            raise ArgumentError("--global-batch-size is missing, and a dry run cannot find it in the data")
        args.micro_batch_size = 1
        if getattr(args, "eval_micro_batch_size", None) is None:
            found |= {"eval_micro_batch_size"}
    limits = [args.prefix_tree_max_tokens, args.max_position_embeddings]
    if "seq_length" in found and None not in limits:  # without one of them the job is refused
        args.seq_length = min(limits)
    return found


def largest_micro_batch_size(steps: Sequence[Need], *, stages: int, multiple: int) -> int:
    """Return the samples per micro-batch that make the fewest micro-batches, a multiple of ``multiple``.

    A step has at least as many micro-batches as pipeline stages, if it has the samples: with fewer, some stages idle.
    """

    def fits(size: int) -> bool:
        counts = [(step, step.samples // size) for step in steps]
        return all(
            count >= max(step.micro_batches, min(stages, step.samples)) and count % multiple == 0
            for step, count in counts
        )

    common = math.gcd(*(step.samples for step in steps))
    # The steps were counted with one sample per micro-batch.
    return next((size for size in range(common, 1, -1) if common % size == 0 and fits(size)), 1)


def settle(
    args: argparse.Namespace, omitted: frozenset[str], orders: Sequence[SampleOrder], *, micro_batch_size: int
) -> str:
    """Set the arguments that the data decides, and return them as words of a command line; see :func:`fill_omitted`."""
    if "micro_batch_size" in omitted:
        args.micro_batch_size = micro_batch_size
    if "eval_micro_batch_size" in omitted:
        args.eval_micro_batch_size = micro_batch_size
    if "seq_length" in omitted:
        # Of all samples, because the job refuses a longer one when it reads it. Sequence parallelism divides the
        # warm-up's tokens over the tensor ranks.
        longest = max(len(sample) for order in orders for group in order.groups for sample in group)
        ranks = args.tensor_model_parallel_size
        args.seq_length = args.encoder_seq_length = min(args.seq_length, -(-longest // ranks) * ranks)
    return " ".join(f"--{name.replace('_', '-')} {vars(args)[name]}" for name in _FOUND if name in omitted)
