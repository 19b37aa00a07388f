"""Held-out samples, which nothing learns from: periodic evaluation by the job's objective."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.data.batches import trie_order
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.step_planner import fold_micro_batches, make_targets
from mcore_prefix_tree.mcore.ranks import everyone, has_logits
from mcore_prefix_tree.mcore.seam.multi_token import take_logged_losses
from mcore_prefix_tree.objectives import add_means
from mcore_prefix_tree.objectives.metrics import NO_SAMPLE, not_finite
from mcore_prefix_tree.plan import Carrying
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Loss and metrics of the held-out samples under the current weights."""

    iteration: int  # number of training steps behind the weights; 0 before the first
    loss: float  # loss of the job's objective, as in one step over all these samples
    samples: int
    logical_tokens: int
    physical_tokens: int  # tokens computed, over all ranks, without padding
    seconds: float  # time for folding and forward
    metrics: Mapping[str, float] = field(default_factory=dict)  # means that the objective reports, over all samples


class HeldOut:
    """Held-out samples, planned once.

    About as many are computed together as in a step, so that an evaluation needs no more memory than training; the
    targets of their losses come from all of them, as in one step.

    Args:
        groups: samples that belong together: those of a line, of a group or of a pair.
        per_step: number of samples in a step, or of its groups (``by_group``).
        in_trie_order: whether to compute neighbours in the trie together.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Sample]],
        job: Job,
        *,
        per_step: int,
        by_group: bool = False,
        in_trie_order: bool = False,
    ) -> None:
        self._job = job
        if in_trie_order:
            groups = [groups[unit] for unit in trie_order(groups).tolist()]
        self._samples = list(chain.from_iterable(groups))
        self._targets = make_targets(job, self._samples)
        self._totals = Totals(job)
        # Of each part this rank's micro-batches, as indices into all samples, and its chunks of trees.
        self._parts: list[tuple[list[tuple[int, ...]], Carrying | None]] = []
        self._physical_tokens = 0
        for part in _parts(groups, per_step, by_group=by_group):
            own = self._samples[part.start : part.stop]
            plan = job.folding.plan(own, together=job.objective.together(own), trains=False)
            mine = plan.micro_batches[job.dp_rank]
            cut = [tuple(part.start + index for index in indices) for indices in mine]
            self._parts.append((cut, plan.carrying_of(job.dp_rank)))
            self._physical_tokens += sum(map(sum, plan.physical_tokens))

    def evaluate(self, chunks: Sequence[torch.nn.Module], iteration: int) -> Evaluation:
        """Return the loss and metrics of the samples; all ranks together. Weights and gradients stay as they are.

        Raises:
            SampleError: an output of the model is NaN or infinite; names the sample. Supervised training, which
                checks no single sample, returns a loss that is not finite instead.
        """
        started = time.perf_counter()
        reported = []
        for cut, carrying in self._parts:
            batches = fold_micro_batches(self._samples, cut, self._job, self._targets, carrying)
            folded = self._job.hook.before_step(batches, self._job.forward(chunks))
            with torch.no_grad():
                reported += run_schedule(chunks, folded, self._job.forward_step, forward_only=True)
        check_finite(reported, [own for cut, _ in self._parts for own in cut], self._samples, self._job)
        loss, metrics = self._totals.of(reported, {} if self._targets is None else self._targets.metrics)
        return Evaluation(
            iteration=iteration,
            loss=loss,
            samples=len(self._samples),
            logical_tokens=sum(map(len, self._samples)),
            physical_tokens=self._physical_tokens,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )


def _parts(groups: Sequence[Sequence[Sample]], per_step: int, *, by_group: bool) -> Iterator[range]:
    """Yield the sample indices of each part: complete groups, as many as a step takes or as fill its sample count."""
    start = stop = taken = 0
    for group in groups:
        stop += len(group)
        taken += 1 if by_group else len(group)
        if taken >= per_step:
            yield range(start, stop)
            start, taken = stop, 0
    if stop > start:
        yield range(start, stop)


class Totals:
    """Sums of reports over all ranks."""

    def __init__(self, job: Job, *, trains: bool = False) -> None:
        """Take a job; ``trains`` adds the losses of multi-token prediction, under upstream's names."""
        self._device = job.folding.device
        self._depths = job.folding.depths if trains else 0
        # Only the last pipeline stage sees them; known to all after the first time.
        deeper = [f"mtp_{depth} loss" for depth in range(1, self._depths + 1)]
        self._metric_names: list[str] | None = deeper if job.objective.is_weighted_sum else None

    def of(self, reported: Sequence[Any], known: Mapping[str, tuple[float, float]]) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics, after one collective; ``known`` are metrics that every rank has."""
        if not has_logits():
            reported = []
        means = add_means(entry.get("metrics", {}) for entry in reported)
        if self._depths and has_logits():
            losses = enumerate(take_logged_losses(), start=1)
            means |= {f"mtp_{depth} loss": torch.tensor([loss, len(reported)]) for depth, loss in losses}
        if self._metric_names is None:
            self._metric_names = list(dict.fromkeys(name for names in everyone(list(means)) for name in names))
        totals = torch.zeros(1 + len(self._metric_names), 2, dtype=torch.float64, device=self._device)
        if has_logits():
            totals[0, 0] = sum(float(entry["loss_sum"]) for entry in reported)
            totals[0, 1] = sum(int(entry["num_tokens"]) for entry in reported)
            assert means.keys() == set(self._metric_names), "an objective reports the same metrics in every step"
            for row, name in enumerate(self._metric_names, start=1):
                totals[row] = means[name]
        dist.all_reduce(totals)
        (loss_sum, num_tokens), *of_names = totals.tolist()
        metrics = dict(known) | dict(zip(self._metric_names, of_names, strict=True))
        return (
            loss_sum / max(num_tokens, 1),
            {name: total / weight for name, (total, weight) in metrics.items() if weight},
        )


def check_finite(
    reported: Sequence[Any], sample_index: Sequence[Sequence[int]], samples: Sequence[Sample], job: Job
) -> None:
    """Reject a model output that is not finite with SampleError, on all ranks, if the objective looks at samples."""
    if job.objective.is_weighted_sum:
        return
    first = len(samples)
    if has_logits():
        for entry, indices in zip(reported, sample_index, strict=True):
            bad = int(entry["bad_sample"])
            first = min(first, first if bad == NO_SAMPLE else indices[bad])
    of_all = torch.tensor(first, device=job.folding.device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MIN)
    if int(of_all) < len(samples):
        raise not_finite(samples[int(of_all)])
