"""Sums of the micro-batch reports of all ranks: every rank knows the loss and the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.ranks import everyone, has_logits
from mcore_prefix_tree.mcore.seam.multi_token import take_logged_losses
from mcore_prefix_tree.objectives import add_means
from mcore_prefix_tree.objectives.metrics import NO_SAMPLE, not_finite
from mcore_prefix_tree.sample import Sample


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
