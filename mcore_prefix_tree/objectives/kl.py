"""Estimators of the divergence from a reference policy, from one sampled token: k1, k2, k3.

With ``d = log pi(y) - log ref(y)`` for y drawn from pi (Schulman, "Approximating KL Divergence", 2020):

    k1 = d                    unbiased, of either sign
    k2 = d^2 / 2              biased, never negative
    k3 = exp(-d) - 1 + d      unbiased, never negative

A good estimator of the value need not have the right gradient. Differentiated as a loss, k1's expected gradient is 0,
k2's is that of KL(pi || ref), and k3's only to first order (Liu et al., "Rethinking KL Regularization in RLHF", 2025).
Times the importance ratio pi / old, differentiated too, k1 and k3 have the right one, also if the tokens were drawn
from an older policy (DeepSeek-V3.2, 2025, section 3.1).

Subtracted from the rewards, an estimator k is not differentiated: its expected gradient is that of E_pi[k], less
E_pi[grad k]. For k1 that is the gradient of KL(pi || ref). For k3 it is that of KL(pi || ref) - KL(ref || pi), which
vanishes to first order if the two are close and may point away from the reference; so may k2's. They exist for
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mcore_prefix_tree.objectives.scored import Float64Array, ScoredTokens
from mcore_prefix_tree.utils.lazy_torch import torch

KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) is far outside every clipping range, and fp32 ends at exp(88).
LOG_RATIO_LIMIT = 20.0


def kl_estimate(logprob: torch.Tensor, ref_logprob: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate the divergence elementwise, in nats; differentiable in ``logprob``; both tensors have one shape, any.

    k3 is constant once d is below -LOG_RATIO_LIMIT. (TRL has no such bound, verl cuts the estimate itself at 10.)
    """
    difference = logprob - ref_logprob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    difference = difference.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-difference) + difference


@dataclass(frozen=True, kw_only=True, eq=False)
class KLPenalty:
    """Penalty subtracted from the rewards, float64 ``[K]``, and the divergence to report; before a step runs."""

    of_token: Float64Array
    metrics: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, scored: ScoredTokens, coef: float, estimator: KLEstimator, setting: str) -> KLPenalty:
        """Compute the penalty of a step; raises SampleError if a sample lacks ``old_logprobs`` or ``ref_logprobs``."""
        old, ref = (torch.from_numpy(scored.column(f"{name}_logprobs", setting)).double() for name in ("old", "ref"))
        return cls(
            of_token=coef * kl_estimate(old, ref, estimator).numpy(),
            metrics={"kl": (float(kl_estimate(old, ref, "k3").sum()), float(len(old)))},
        )
