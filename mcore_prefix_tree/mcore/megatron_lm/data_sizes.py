"""Sizes that a job's data decides: a dry run finds ``--micro-batch-size`` and ``--seq-length`` if they are omitted.

``--prefix-tree-max-tokens`` fills a GPU. A number of samples cannot: how many fit the budget depends on the prefixes
that they share. So the right ``--micro-batch-size`` is the largest that every step fits, which makes as few
micro-batches as the budget allows. ``--seq-length`` bounds the longest sample, and Megatron-LM warms its fused
functions up on ``--seq-length`` times ``--micro-batch-size`` tokens: with the longest sample this stays small.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.megatron_lm.step_batches import StepSize, check_fits, checked_steps
from mcore_prefix_tree.objectives import Objective

_FOUND = ("micro_batch_size", "seq_length")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Demands of a step on the sizes: samples per data-parallel rank, and micro-batches per rank under the budget."""

    samples: int
    micro_batches: int


def fill_omitted(args: argparse.Namespace, args_defaults: Mapping[str, Any] | None) -> frozenset[str]:
    """Fill sizes that a dry run has to find, so that Megatron can validate the rest; return their names.

    Omitted ones become the smallest micro-batch and the longest sample allowed. ``args_defaults`` is None if unknown.

    Raises:
        ArgumentError: the number of samples in a step is omitted too.
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


def needs(
    order: SampleOrder,
    size_at: Callable[[int], StepSize],
    folding: Folding,
    objective: Objective,
    *,
    end: int,
) -> Iterator[Need]:
    """Yield the demands of :func:`checked_steps`; raise ArgumentError for a step that exceeds its micro-batches."""
    for size, samples in checked_steps(order, size_at, consumed=0, end=end):
        needed = folding.fewest_micro_batches(samples, together=objective.together(samples))
        if needed > size.micro_batches:
            check_fits(samples, size, folding, objective)
        yield Need(samples=size.samples // size.dp_size, micro_batches=needed)


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
