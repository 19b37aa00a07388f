"""What the micro-batches of all ranks reported, added up: every rank knows the loss of a step and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.trainer.session import Session
from mcore_prefix_tree.objectives import add_means
from mcore_prefix_tree.objectives.metrics import NO_SAMPLE, not_finite
from mcore_prefix_tree.sample import Sample


class Totals:
    """Adds up reports, all ranks together.

    Args:
        place: this rank's.
        has_metrics: whether the objective reports any.
    """

    def __init__(self, place: Session, *, has_metrics: bool) -> None:
        self._place = place
        # Only the last pipeline stage sees them; known to all after the first time.
        self._metric_names: list[str] | None = None if has_metrics else []

    def of(
        self, reported: Sequence[Any], *, physical_tokens: int, known: Mapping[str, tuple[float, float]]
    ) -> tuple[float, int, dict[str, float]]:
        """The mean loss, the physical tokens and the metrics, after one collective.

        Args:
            reported: by the loss function for each of this rank's micro-batches.
            physical_tokens: of these.
            known: metrics that every rank knew before, as (sum, weight).
        """
        if not self._place.has_logits:
            reported = []
        means = add_means(entry.get("metrics", {}) for entry in reported)
        if self._metric_names is None:
            self._metric_names = list(dict.fromkeys(name for names in everyone(list(means)) for name in names))
        totals = torch.zeros(2 + len(self._metric_names), 2, dtype=torch.float64, device=self._place.device)
        if self._place.has_logits:
            totals[0, 0] = sum(float(entry["loss_sum"]) for entry in reported)
            totals[0, 1] = sum(int(entry["num_tokens"]) for entry in reported)
            totals[1, 0] = physical_tokens
            assert means.keys() == set(self._metric_names), "an objective reports the same metrics in every step"
            for row, name in enumerate(self._metric_names, start=2):
                totals[row] = means[name]
        dist.all_reduce(totals)
        (loss_sum, num_tokens), (physical, _), *of_names = totals.tolist()
        metrics = dict(known) | dict(zip(self._metric_names, of_names, strict=True))
        return (
            loss_sum / max(num_tokens, 1),
            int(physical),
            {name: total / weight for name, (total, weight) in metrics.items() if weight},
        )


def check_finite(
    reported: Sequence[Any], sample_index: Sequence[Sequence[int]], samples: Sequence[Sample], place: Session
) -> None:
    """Let all ranks refuse a model output that is not finite.

    Args:
        reported: as of :meth:`Totals.of`, by an objective that looks at samples.
        sample_index: for each of these micro-batches, the indices of its samples.
        samples: of all ranks.
        place: this rank's.

    Raises:
        SampleError: names the first such sample.
    """
    first = len(samples)
    if place.has_logits:
        for entry, indices in zip(reported, sample_index, strict=True):
            bad = int(entry["bad_sample"])
            first = min(first, first if bad == NO_SAMPLE else indices[bad])
    of_all = torch.tensor(first, device=place.device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MIN)
    if int(of_all) < len(samples):
        raise not_finite(samples[int(of_all)])
