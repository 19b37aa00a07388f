"""What folding saved: a step folded and unfolded, on the same batch in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.mcore.forward_step import sft_forward_step
from mcore_prefix_tree.mcore.train.memory import PeakMemory
from mcore_prefix_tree.mcore.train.schedule import ForwardStep, plan_folded, run_schedule
from mcore_prefix_tree.mcore.train.session import Session
from mcore_prefix_tree.mcore.train.unfolded import plan_unfolded, stock_forward_step
from mcore_prefix_tree.recipe import Recipe
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One way to run a batch.

    Attributes:
        name: of the way.
        seconds: forward and backward of the whole batch with the host's planning, the slowest rank, median of repeats.
        peak_bytes: of the rank that needed most, beyond model and optimizer; None where it cannot be known.
        tokens: computed, over all data-parallel ranks, without padding.
    """

    name: str
    seconds: float
    peak_bytes: int | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Folded against two ways of not folding.

    Attributes:
        folded: as ``train`` runs it.
        packed: the same back-end and budget, with every sample a tree of its own: a packed varlen batch.
        stock: Megatron's own attention and cross-entropy, one sample a micro-batch.
        logical_tokens: of the batch.
        fold_ratio: logical over physical tokens, the ideal.
    """

    folded: Measurement
    packed: Measurement
    stock: Measurement
    logical_tokens: int
    fold_ratio: float

    @property
    def speedup(self) -> float:
        """Over the faster of the two unfolded ways."""
        return min(self.packed.seconds, self.stock.seconds) / self.folded.seconds


def compare(
    chunks: Sequence[Any], samples: Sequence[Sample], recipe: Recipe, place: Session, *, repeats: int, warmup: int
) -> Comparison:
    """Measure forward and backward; no optimizer step. The gradient buffers of ``chunks`` are left empty.

    Args:
        chunks: in Megatron's DDP.
        samples: the whole batch.
        recipe: the job's.
        place: this rank's.
        repeats: counted runs of each way.
        warmup: runs of each way before these.
    """
    alone = [
        Sample(tokens=sample.tokens, loss_mask=sample.loss_mask, merge_key=index, source=sample.source)
        for index, sample in enumerate(samples)
    ]
    physical = _tokens(samples, recipe, place)
    logical = sum(len(sample) for sample in samples)

    def run(name: str, tokens: int, make: Callable[[], list[Any]], step: ForwardStep) -> Measurement:
        return _measure(name, tokens, chunks, make, step, place, repeats, warmup)

    return Comparison(
        folded=run("folded", physical, lambda: plan_folded(samples, recipe, place).micro_batches, sft_forward_step),
        packed=run(
            "unfolded, packed", logical, lambda: plan_folded(alone, recipe, place).micro_batches, sft_forward_step
        ),
        stock=run(
            "unfolded, stock", logical, lambda: plan_unfolded(samples, recipe, place).micro_batches, stock_forward_step
        ),
        logical_tokens=logical,
        fold_ratio=logical / physical,
    )


def _tokens(samples: Sequence[Sample], recipe: Recipe, place: Session) -> int:
    from megatron.core import parallel_state

    batches = plan_folded(samples, recipe, place).micro_batches
    total = torch.tensor(sum(batch.layout.physical_tokens for batch in batches), device=place.device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return int(total)


def _measure(
    name: str,
    tokens: int,
    chunks: Sequence[Any],
    make: Callable[[], list[Any]],
    step: ForwardStep,
    place: Session,
    repeats: int,
    warmup: int,
) -> Measurement:
    peak = PeakMemory(place.device)
    times = []
    for _ in range(warmup + repeats):
        dist.barrier()
        started = time.perf_counter()
        run_schedule(chunks, make(), step)
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        for chunk in chunks:
            chunk.zero_grad_buffer()
    median = statistics.median(times[warmup:])
    # Every rank waits for the slowest in a real step, and the job needs what the hungriest rank needs.
    worst = torch.tensor([median, float(peak.bytes() or 0)], dtype=torch.float64, device=place.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    seconds, peak_bytes = worst.tolist()
    return Measurement(name=name, seconds=seconds, peak_bytes=int(peak_bytes) or None, tokens=tokens)
