"""Results of a loss: a sum over the micro-batch, and means that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import SampleError
from mcore_prefix_tree.utils.lazy_torch import torch

# By name, float64 tensors [2]: a sum and its weight. They are summed first and divided last.
Means: TypeAlias = "dict[str, torch.Tensor]"

NO_SAMPLE = 2**62


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    """Loss of one micro-batch."""

    loss: torch.Tensor  # scalar, the weighted sum; the step divides it by its divisor
    metrics: Means = field(default_factory=dict)  # additive means, detached
    # int64 scalar tensor, the first sample of the micro-batch for which the model's output is NaN or infinite, or
    # NO_SAMPLE. Read it once per step: that waits for the device. None for a weighted sum, which does not read single
    # samples.
    bad_sample: torch.Tensor | None = None


def weighted_mean(values: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return ``[2]``: the weighted sum of values, of any shape, and the sum of the weights or of one number."""
    values = values.detach().double()
    # A number that was copied from the host would wait for the device.
    weights = weight.double() if isinstance(weight, torch.Tensor) else torch.full_like(values, weight)
    weights = weights.expand_as(values)
    return torch.stack([(values * weights).sum(), weights.sum()])


def add_means(outputs: Iterable[Mapping[str, torch.Tensor]]) -> Means:
    """Sum ``[2]`` tensors by name; a metric that only some have keeps its own weight."""
    total: Means = {}
    for metrics in outputs:
        for name, pair in metrics.items():
            total[name] = total[name] + pair if name in total else pair
    return total


def first_bad_sample(values: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return the first sample of ``[K]`` with a value that is not finite, or NO_SAMPLE; no device sync."""
    none = torch.full((1,), NO_SAMPLE, dtype=torch.int64, device=values.device)
    return torch.cat([torch.where(torch.isfinite(values.detach()), none, sample), none]).amin()


def not_finite(sample: Sample) -> SampleError:
    """Return the error to raise for a sample whose model output is not finite."""
    return SampleError(
        f"{sample.source}: the model's output for this sample is NaN or infinite; the weights have diverged, or its "
        "tokens lead outside the range of the model's dtype"
    )
