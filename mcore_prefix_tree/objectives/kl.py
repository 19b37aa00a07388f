"""Estimators of the divergence from a reference policy, from one sampled token: k1, k2, k3.

With ``d = log pi(y) - log ref(y)`` for y drawn from pi (Schulman, "Approximating KL Divergence", 2020):

    k1 = d                    unbiased, of either sign
    k2 = d^2 / 2              biased, never negative
    k3 = exp(-d) - 1 + d      unbiased, never negative

What estimates the value well need not have the right gradient. Differentiated as a loss, k1's expected gradient is 0,
k2's is that of KL(pi || ref), and k3's only to first order (Liu et al., "Rethinking KL Regularization in RLHF", 2025).
Times the importance ratio pi / old, differentiated too, k1 and k3 have the right one, also where the tokens were drawn
from an older policy (DeepSeek-V3.2, 2025, section 3.1).
"""

from __future__ import annotations

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) is far outside every clipping range, and fp32 ends at exp(88).
LOG_RATIO_LIMIT = 20.0


def kl_estimate(logprob: torch.Tensor, ref_logprob: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Elementwise, in nats; differentiable in ``logprob``. k3 grows no further once d is below -LOG_RATIO_LIMIT."""
    difference = logprob - ref_logprob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1((-difference).clamp(max=LOG_RATIO_LIMIT)) + difference
