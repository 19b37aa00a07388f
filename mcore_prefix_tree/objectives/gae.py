"""Generalized advantage estimation, on the host before a step runs.

Legend: K scored tokens.
"""

from __future__ import annotations

import numpy as np

from mcore_prefix_tree.objectives.scored import Float64Array, ScoredTokens
from mcore_prefix_tree.signals import SampleError


def token_rewards(scored: ScoredTokens, setting: str, *, penalty: Float64Array | None = None) -> Float64Array:
    """Each sample's reward at its last scored token, each turn's reward at the turn's last, less a penalty per token.

    Returns:
        float64 ``[K]``.

    Raises:
        SampleError: a sample with scored tokens lacks ``reward``, or is one turn of several.
    """
    reward = np.zeros(len(scored))
    for index in np.flatnonzero(scored.lens).tolist():
        value = scored.required(index, "reward", setting)
        sample = scored.samples[index]
        if sample.signals.turn is not None:
            raise SampleError(
                f"{sample.source}: field 'turn' is set, and {setting} discounts over a whole rollout; give one sample "
                "for each rollout with all its turns scored (data.expand_turns=false)"
            )
        end = scored.cu_lens[index + 1]
        if np.ndim(value) == 0:
            reward[end - 1] = value
        else:
            turn = scored.turn[scored.cu_lens[index] : end]
            reward[scored.cu_lens[index] + np.searchsorted(turn, np.arange(len(value)), side="right") - 1] = value
    return reward if penalty is None else reward - penalty


def gae(
    scored: ScoredTokens, reward: Float64Array, value: Float64Array, *, gamma: float, lam: float
) -> tuple[Float64Array, Float64Array]:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t`` (Schulman et al., 2016,
    arXiv:1506.02438, eq. 16).

    Time counts scored tokens only: what the environment says between two turns takes none. After the last token there
    is nothing.

    Args:
        scored: of the step.
        reward: float64 ``[K]``.
        value: float64 ``[K]``, the critic's estimate of the state that each token is chosen in.
        gamma: discount.
        lam: lambda.

    Returns:
        Advantages and returns (advantage + value), float64 ``[K]`` each.
    """
    remaining = scored.cu_lens[1:][scored.sample] - 1 - np.arange(len(scored))  # scored tokens after this one
    following = np.where(remaining > 0, np.append(value, 0.0)[1:], 0.0)
    advantage = reward + gamma * following - value
    # Sums of twice as many steps at a time: after the pass with reach d, entry t holds the first 2 d terms of its sum.
    reach, decay = 1, gamma * lam
    while reach <= remaining.max(initial=0):
        later = np.zeros_like(advantage)
        later[:-reach] = advantage[reach:]
        advantage = advantage + decay**reach * np.where(remaining >= reach, later, 0.0)
        reach *= 2
    return advantage, advantage + value
