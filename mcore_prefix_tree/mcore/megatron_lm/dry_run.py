"""``--prefix-tree-dry-run``: the first step's plan and a rank's memory, without a GPU and without a job.

It also finds ``--micro-batch-size`` and ``--seq-length`` in the data if they are omitted. ``--prefix-tree-max-tokens``
fills a GPU; how many samples fit it depends on the prefixes that they share. So the right ``--micro-batch-size`` is the
largest that every step fits. ``--seq-length`` bounds the longest sample, and Megatron-LM warms its fused functions up
on ``--seq-length`` times ``--micro-batch-size`` tokens: with the longest sample this stays small.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from mcore_prefix_tree.arguments.refusals import ArgumentError, has_scalar_head
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.layout.stats import forest_counts
from mcore_prefix_tree.mcore.engine.backend import attention_cases_of_model
from mcore_prefix_tree.mcore.engine.carried_trees import count_carried_bytes
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.megatron_lm.activation_memory import activation_bytes, warm_up_bytes
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import (
    count_model_work,
    make_folding_from_args,
    make_objective_from_args,
)
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import hybrid_pattern
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
    """Describe the first step of a job with these arguments, and the memory of a rank.

    Memory is an estimate for the most loaded rank: Megatron's own for weights, gradients and optimizer, and that of
    :func:`activation_bytes`, which knows experts and recomputation, for a step whose micro-batches are all as long as
    the longest. Hybrid models have no estimate. The first line gives the sizes in ``omitted`` (:func:`fill_omitted`).
    Raises ArgumentError if a step does not fit its micro-batches, SampleError for bad data.
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
    return "\n".join([*lines, *_describe_memory(args, samples, plan, folding)])


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


def _describe_memory(
    args: argparse.Namespace, samples: Sequence[Sample], plan: ForestPlan, folding: Folding
) -> list[str]:
    """Describe the memory of the most loaded rank, or why there is no estimate."""
    carried = _carried(args, plan, folding)
    if hybrid_pattern(args) is not None or count_model_work(args).state_layers:
        kind = "a hybrid model" if hybrid_pattern(args) is not None else "a model with Gated DeltaNet"
        states = _states(args, samples, plan, folding)
        return [*states, *carried, f"a rank's memory: no estimate, because Megatron-LM has none of {kind}'s weights"]
    cases = {
        "longest micro-batch": max(map(max, plan.physical_tokens)),
        "at --prefix-tree-max-tokens": folding.max_tokens,
    }
    kept = "activations" if args.num_experts is None else "activations with balanced routing"
    has_logits = not (args.prefix_tree_fused_head or has_scalar_head(args))
    sizes = {"micro_batches": plan.num_micro_batches, "logits_width": args.padded_vocab_size if has_logits else 0}
    config = core_transformer_config_from_args(args)
    lines = [
        f"a rank's memory by an estimate, of {args.world_size} ranks:",
        f"  Megatron-LM's warm-up at the start, before all else: {warm_up_bytes(args) / GIB:.3g} GiB",
        f"  weights, gradients, optimizer: {(_weights_in_layout(args) + _whole_projections(args)) / GIB:.3g} GiB",
    ]
    lines += [
        f"  {kept}, {case} ({tokens} tokens): {activation_bytes(config, tokens, **sizes) / GIB:.3g} GiB"
        for case, tokens in cases.items()
    ]
    return lines + carried


def _carried(args: argparse.Namespace, plan: ForestPlan, folding: Folding) -> list[str]:
    """Describe what the chunks of trees above the budget read of each other, if there are such trees."""
    if plan.carrying is None:
        return []
    config = core_transformer_config_from_args(args)
    attention = attention_cases_of_model(config, device=folding.device, deterministic=False)
    folding = replace(folding, config=config, attention_cases=attention)
    carried = count_carried_bytes(plan, folding, count_model_work(args)) / GIB
    return [f"  keys, values and states that chunks read, with their gradients, at most: {carried:.3g} GiB"]


def _states(args: argparse.Namespace, samples: Sequence[Sample], plan: ForestPlan, folding: Folding) -> list[str]:
    """Describe the states that recurrent layers keep of a micro-batch, if there are such layers."""
    work = count_model_work(args)
    if not work.state_layers:
        return []
    layouts = (folding.layout([samples[i] for i in batch]) for rank in plan.micro_batches for batch in rank)
    most = max(int(forest_counts(layout)["segment_states"]) for layout in layouts)
    kept = most * work.state_bytes / args.tensor_model_parallel_size
    return [
        f"first step: segments below branch points start from states of recurrent layers, {most} at most in a "
        f"micro-batch: {kept / GIB:.3g} GiB in {work.state_layers} layers, or that of one layer with full "
        f"recomputation; --prefix-tree-max-tokens counts them, as {work.state_tokens} tokens for each path that joins "
        "a tree"
    ]


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


def _whole_projections(args: argparse.Namespace) -> float:
    """Return the bytes that the estimate cuts off latent attention's down projections, which ranks hold in full."""
    if not args.multi_latent_attention:
        return 0.0
    tensor = args.tensor_model_parallel_size
    width = (args.q_lora_rank or 0) + args.kv_lora_rank + args.qk_pos_emb_head_dim
    cut_off: float = args.num_layers / args.pipeline_model_parallel_size * args.hidden_size * width * (1 - 1 / tensor)
    # As compute_weight_and_optimizer_memory counts a parameter.
    bytes_each = 6 + 12 / args.data_parallel_size if args.use_distributed_optimizer else 18
    return cut_off * bytes_each


# The estimate of core_v0.16.1 cuts experts like everything else. So experts are counted separately, by the bytes that
# those of one rank add to a model in the layout of experts.
def _weights_in_layout(args: argparse.Namespace) -> float:
    """Return the bytes of weights, gradients and optimizer of the most loaded rank, but for whole projections."""
    if args.num_experts is None:
        return _count_weight_bytes(args)
    experts, tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    world_size = args.world_size // experts
    layout = {
        "expert_model_parallel_size": 1,
        "tensor_model_parallel_size": tensor,
        "world_size": world_size,
        "data_parallel_size": world_size // (tensor * args.pipeline_model_parallel_size),
    }
    without = _count_weight_bytes(args, num_experts=0, **layout)
    return (
        _count_weight_bytes(args, num_experts=0)
        + _count_weight_bytes(args, num_experts=args.num_experts // experts, **layout)
        - without
    )


def _count_weight_bytes(args: argparse.Namespace, **changed: Any) -> float:
    if has_scalar_head(args):  # one row, but the estimate would count a vocabulary
        changed["untie_embeddings_and_output_weights"] = False
    # The estimate writes to its arguments.
    return float(compute_weight_and_optimizer_memory(argparse.Namespace(**vars(copy.deepcopy(args)) | changed)))


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
