"""Time micro-batches of different sizes and depths, for a cost model in seconds."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_prefix_tree.layout.stats import branching
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.stand_ins import make_stand_in, plain
from mcore_prefix_tree.mcore.engine.step_planner import fold_micro_batches, make_targets
from mcore_prefix_tree.plan import BudgetError, CostModel, Measured
from mcore_prefix_tree.sample import Sample

# Parts of the largest micro-batch that are measured too.
_SIZES = (8, 4, 2, 1)
# Branch points of samples that are made to time the levels of recurrent layers.
_FORKS = (8, 32)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Timings of micro-batches, and the cost model that fits them.

    Attributes:
        measured: timings of a forward and backward of one micro-batch each, the fastest of its rounds.
        cost: fitted cost model, in seconds.
        worst: largest relative error of the fit.
    """

    measured: list[Measured]
    cost: CostModel
    worst: float

    def to_json(self) -> dict[str, Any]:
        """Return the input of :func:`mcore_prefix_tree.plan.read_measured`, and the fit."""
        return {
            "measured": [one._asdict() for one in self.measured],
            "cost": asdict(self.cost),
            "worst_relative_error": self.worst,
        }


def calibrate(chunks: Sequence[Any], samples: Sequence[Sample], job: Job, *, repeats: int) -> Calibration:
    """Time micro-batches of a job's own samples. Every rank computes the same ones and waits for the slowest.

    For several sizes up to the budget, it times one micro-batch of the shortest samples that fill it and one of the
    longest: the depth of the tokens separates the cost of a token from that of a visible pair. If the head computes
    only scored tokens, the two largest run once more with next to nothing scored, which shows the cost of scoring.
    For recurrent layers the longest sample runs with branches along its path, and its branches run as trees.

    ``chunks`` are in Megatron's DDP, and their gradients are left empty. ``repeats`` rounds are timed after a first.
    Samples above the budget, which are only run in chunks, are left out; raises BudgetError if all are.
    """
    job, samples = plain(job, samples)
    folding = job.folding
    whole = [sample for sample in samples if len(sample) <= folding.max_tokens]
    if not whole:
        raise BudgetError(
            f"{samples[0].source}: {len(samples[0])} tokens, and no other sample fits a micro-batch of "
            f"batch.max_tokens={folding.max_tokens}, which are timed; raise batch.max_tokens"
        )
    samples = whole
    cut = _choose(samples, folding)
    scored_alone = job.fused_head and make_stand_in(job).skips_unscored
    if scored_alone:
        for indices in sorted(cut, key=lambda some: folding.physical_tokens([samples[index] for index in some]))[-2:]:
            cut.append([*range(len(samples), len(samples) + len(indices))])
            samples = [*samples, *(_hardly_scored(samples[index]) for index in indices)]
    is_recurrent = job.work.state_layers > 0
    for forks in _FORKS if is_recurrent else ():
        for alone in (False, True):
            branches = _branches(max(whole, key=len), forks, folding.max_tokens, alone=alone)
            cut.append([*range(len(samples), len(samples) + len(branches))])
            samples = [*samples, *branches]
    batches = fold_micro_batches(samples, cut, job, make_targets(job, samples))
    # The end of a step belongs to no micro-batch.
    finalize, job.config.finalize_model_grads_func = job.config.finalize_model_grads_func, None
    try:
        rounds = [[_seconds(chunks, batch, job) for batch in batches] for _ in range(1 + repeats)]
    finally:
        job.config.finalize_model_grads_func = finalize
    measured = [
        Measured(
            tokens=batch.layout.padded_size,
            pairs=batch.layout.visible_pairs,
            # Other work of the machine only adds time.
            seconds=min(seconds),
            scored=int((batch.layout.loss_weight != 0).sum()) if scored_alone else 0,
            **(_segments(batch.layout.node_parent) if is_recurrent else {}),
        )
        for batch, *seconds in zip(batches, *rounds[1:], strict=True)
    ]
    assert folding.cost_model is not None
    cost = folding.cost_model.calibrated(measured)
    worst = max(abs(cost.of_measured(one) / one.seconds - 1) for one in measured)
    return Calibration(measured=measured, cost=cost, worst=worst)


def _hardly_scored(sample: Sample) -> Sample:
    """Return a copy of the sample that scores only the last token."""
    mask = np.zeros(len(sample), dtype=np.float32)
    mask[-1] = 1
    return Sample(tokens=sample.tokens, loss_mask=mask, merge_key=sample.merge_key, source=sample.source)


def _branches(sample: Sample, forks: int, max_tokens: int, *, alone: bool) -> list[Sample]:
    """Return prefixes of a sample, each with another last token; ``alone``, parts of it that share nothing."""
    length = min(len(sample), max_tokens // 2)  # the branches have one token each
    run = max(1, length // forks)
    made = []
    for start in range(0, min(length - 1, run * forks), run):
        end = min(start + run, length - 1)
        tokens = sample.tokens[start if alone else 0 : end + 1].copy()
        tokens[-1] = 0 if tokens[-1] else 1
        made.append(
            Sample(
                tokens=tokens,
                loss_mask=np.ones(len(tokens), dtype=np.float32),
                merge_key=start if alone else None,
                source=sample.source,
            )
        )
    return made


def _segments(node_parent: np.ndarray[Any, Any]) -> dict[str, int]:
    segments, levels, _ = branching(node_parent)
    return {"segments": segments, "levels": levels}


def _choose(samples: Sequence[Sample], folding: Folding) -> list[list[int]]:
    """Return the indices of each micro-batch's samples; no two micro-batches are the same."""
    shortest_first = sorted(range(len(samples)), key=lambda index: len(samples[index]))
    largest = min(folding.max_tokens, folding.physical_tokens(samples))
    chosen: dict[tuple[int, ...], None] = {}
    for order in (shortest_first, shortest_first[::-1]):
        for part in _SIZES:
            # As many as fit together, at least one: unique tokens only grow with more samples.
            fit = bisect_right(
                range(1, len(order) + 1),
                largest // part,
                key=lambda count: folding.physical_tokens([samples[index] for index in order[:count]]),
            )
            chosen[tuple(sorted(order[: max(1, fit)]))] = None
    return [list(indices) for indices in chosen]


def _seconds(chunks: Sequence[Any], batch: Any, job: Job) -> float:
    dist.barrier()
    started = time.perf_counter()
    run_schedule(chunks, [batch], job.forward_step)
    if job.folding.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=job.folding.device)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)
