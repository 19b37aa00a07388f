"""Tokens sampled by an engine that differs slightly from the policy: weights that correct them, and samples to skip.

Rollout engines have different kernels, dtypes and weights, so that ``rollout``, the log-probability that the engine
reported for a token it sampled, differs from ``old``, the trainer's log-probability with the same weights.

    truncate   clip(old / rollout, tis_floor, tis_cap)                 Yao et al., "Your Efficient RL Framework
                                                                       Secretly Brings You Off-Policy RL Training", 2025
    mask       old / rollout, and 0 outside of [tis_floor, tis_cap]    IcePop (Ling Team, 2025, arXiv:2510.18855)

for each token, or with the product over the sample's scored tokens for all of them. Off-policy sequence masking omits
the tokens with a negative advantage of samples that have become too unlikely: those with the mean over the sample of
log rollout - log pi above a threshold (DeepSeek-V3.2, 2025, arXiv:2512.02556, section 3.1).

Legend: K scored tokens.
"""

from __future__ import annotations

from typing import Literal

from mcore_prefix_tree.objectives.kl import LOG_RATIO_LIMIT
from mcore_prefix_tree.objectives.scored_rows import Rows
from mcore_prefix_tree.utils.lazy_torch import torch

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


def importance_weight(
    old: torch.Tensor, rollout: torch.Tensor, rows: Rows, *, level: Level, mode: Mode, floor: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[K]`` weights without a gradient, and bool ``[K]``, whether the ratio was out of bounds; see above.

    The product of a sequence ignores the loss mask, which has nothing to do with sampling.
    """
    difference = (old - rollout).detach()
    if level == "sequence":
        difference = rows.sum_per_sample(difference)[rows.sample]
    ratio = difference.clamp(max=LOG_RATIO_LIMIT).exp()
    outside = (ratio < floor) | (ratio > cap)
    weight = ratio.clamp(floor, cap) if mode == "truncate" else ratio.masked_fill(outside, 0.0)
    return weight, outside


def is_far_off_policy(
    logprob: torch.Tensor, rollout: torch.Tensor, advantage: torch.Tensor, rows: Rows, threshold: float
) -> torch.Tensor:
    """Return bool ``[K]``: the tokens that off-policy sequence masking omits."""
    moved = rows.mean_per_sample(rollout - logprob.detach())
    return (advantage < 0) & (moved > threshold)[rows.sample]
