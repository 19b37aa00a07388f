"""Kahneman-Tversky optimisation: single completions that are desirable or not.

Legend: P padded tokens, K scored tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.objectives.metrics import LossOutput, first_bad_sample, weighted_mean
from mcore_prefix_tree.objectives.objective import STRICT, TokenObjective
from mcore_prefix_tree.objectives.scored import Int64Array, ScoredTokens
from mcore_prefix_tree.objectives.scored_rows import Rows, Targets, Terms
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import SampleError
from mcore_prefix_tree.utils.lazy_torch import torch


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KTO(TokenObjective):
    """Kahneman-Tversky optimisation of labelled completions (Ethayarajh et al., 2024, arXiv:2402.01306, section 4).

    With r = sum over the scored tokens of ``mask (log pi - log ref)``, the loss of a sample is

        desirable_weight   (1 - sigma(beta (r - z)))   if ``label`` is true
        undesirable_weight (1 - sigma(beta (z - r)))   if it is false

    and the step's loss is the mean over labelled samples. The reference point z has no gradient: with
    ``reference_point=mismatched`` it is the mean of r, and at least 0, over the step's ``mismatched`` samples (another
    prompt's completion, scored under both policies before the step), which have no loss themselves; with ``zero`` it is
    0 (TRL's ``apo_zero_unpaired``). z is as old as that scoring: a job of many steps on one scored file keeps the
    reference point of the policy that scored it.

    Attributes:
        beta: beta, see above.
        desirable_weight: lambda_D, weight of desirable completions.
        undesirable_weight: lambda_U, weight of undesirable completions.
        reference_point: source of z, see above.
    """

    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0
    reference_point: Literal["mismatched", "zero"] = "mismatched"
    starts_from_policy: ClassVar[bool] = True
    terms: ClassVar[Terms] = "sample"

    @property
    def step_check(self) -> Callable[[int, Sequence[Sample]], None] | None:
        return _check_step if self.reference_point == "mismatched" else None

    def check(self, samples: Sequence[Sample]) -> None:
        """Check samples before the first step; the reference point depends on all samples of a step."""
        replace(self, reference_point="zero").targets(samples)

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute labels and the reference point of a step, on the host.

        Raises:
            SampleError: a sample lacks ``label`` or ``ref_logprobs``, or none of its tokens is scored; with
                ``reference_point=mismatched``, a mismatched one lacks ``old_logprobs`` or is missing.
        """
        scored = ScoredTokens.of(samples)
        counts = np.array([not sample.signals.mismatched for sample in samples], dtype=np.int64)
        for index in np.flatnonzero((scored.lens == 0) & (counts > 0)).tolist():
            raise SampleError(f"{samples[index].source}: no token is scored, and kto scores completions")
        labels = [
            0.0 if sample.signals.mismatched else 1.0 if scored.required(index, "label", "kto") else -1.0
            for index, sample in enumerate(samples)
        ]
        point = self._reference_point(scored, counts)
        return Targets(
            scored=scored,
            weight=scored.mask,
            count=counts,
            columns={"ref_logprobs": scored.column("ref_logprobs", "kto")},
            sample_columns={"label": np.array(labels), "reference_point": np.full(len(samples), point)},
            metrics={"reference_point": (point, 1.0)},
        )

    def _reference_point(self, scored: ScoredTokens, counts: Int64Array) -> float:
        """Return z; ``counts`` is int64 ``[S]``, 0 for mismatched samples."""
        if self.reference_point == "zero" or not len(counts):
            return 0.0
        measuring = np.flatnonzero(counts == 0)
        if not len(measuring):
            raise SampleError(
                f"{scored.samples[0].source}: neither this nor another sample of the step is mismatched, and kto with "
                "reference_point=mismatched needs some; add them, or set reference_point=zero"
            )
        total = 0.0
        for index in measuring.tolist():
            old, ref = (scored.required(index, f"{name}_logprobs", "a mismatched sample") for name in ("old", "ref"))
            entries = slice(scored.cu_lens[index], scored.cu_lens[index + 1])
            at = scored.position[entries]
            total += float(np.dot(scored.mask[entries], old[at].astype(np.float64) - ref[at]))
        return max(0.0, total / len(measuring))

    def loss(self, logprob: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> LossOutput:
        """Return the sum over the labelled samples of a micro-batch; ``logprob`` is ``[P]``."""
        scored = logprob[rows.token]
        dtype = scored.dtype
        relative = scored - rows.columns["ref_logprobs"].to(dtype)
        reward = rows.sum_per_sample(rows.weight.to(dtype) * relative)
        label = rows.sample_columns["label"].to(dtype)
        weight = self.desirable_weight * (label > 0).to(dtype) + self.undesirable_weight * (label < 0).to(dtype)
        # 1 - sigma(x) = sigma(-x), without cancellation.
        loss = weight * torch.sigmoid(-self.beta * label * (reward - rows.sample_columns["reference_point"].to(dtype)))
        return LossOutput(
            loss=loss.sum(),
            metrics={
                "reward_chosen": weighted_mean(self.beta * reward, label > 0),
                "reward_rejected": weighted_mean(self.beta * reward, label < 0),
            },
            bad_sample=first_bad_sample(scored, rows.sample),
        )


def _check_step(iteration: int, samples: Sequence[Sample]) -> None:
    if not any(sample.signals.mismatched for sample in samples):
        raise SampleError(
            f"step {iteration}, which {samples[0].source} is in, has no mismatched sample, and kto with "
            "reference_point=mismatched needs one in every step; take larger steps, mix them into the "
            "files and keep their order, or set the option reference_point=zero"
        )
