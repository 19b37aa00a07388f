"""Generalized advantage estimation, on the host before a step runs.

Legend: K scored tokens, N values in segments.
"""

from __future__ import annotations

import numpy as np

from mcore_prefix_tree.objectives.scored import Float64Array, Int64Array, ScoredTokens
from mcore_prefix_tree.signals import SampleError


def token_rewards(scored: ScoredTokens, setting: str, *, penalty: Float64Array | None = None) -> Float64Array:
    """Return float64 ``[K]``: each sample's or turn's reward at its last scored token, less a penalty per token.

    Raises SampleError if a sample with scored tokens lacks ``reward``, or is one turn of several.
    """
    reward = np.zeros(len(scored))
    for index in np.flatnonzero(scored.lens).tolist():
        value = scored.required(index, "reward", setting)
        sample = scored.samples[index]
        if sample.signals.turn is not None:
            raise SampleError(
                f"{sample.source}: field 'turn' is set, and {setting} discounts over complete rollouts; give one "
                "sample per rollout with all its turns scored (data.expand_turns=false)"
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
    """Return advantages and returns (advantage + value), float64 ``[K]`` each.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t`` (Schulman et al., 2016,
    arXiv:1506.02438, eq. 16). Time counts scored tokens only: the environment's text between two turns takes none.
    Nothing follows the last token. ``reward`` is float64 ``[K]``, and so is ``value``, the critic's estimate of the
    state that each token is chosen in.
    """
    following = np.append(value, 0.0)[1:]
    following[scored.cu_lens[1:][scored.lens > 0] - 1] = 0.0
    advantage = sums_to_go(reward + gamma * following - value, scored.cu_lens, decay=gamma * lam)
    return advantage, advantage + value


def sums_to_go(values: Float64Array, cu_lens: Int64Array, *, decay: float = 1.0) -> Float64Array:
    """Return ``S_t = x_t + decay S_{t+1}``, float64 ``[N]``, within each segment ``cu_lens[s]:cu_lens[s + 1]``."""
    remaining = np.repeat(cu_lens[1:], np.diff(cu_lens)) - 1 - np.arange(len(values))  # entries after this one
    total = values
    reach = 1  # twice as many at a time: after the pass with reach d, entry t holds the first 2 d terms of its sum
    while reach <= remaining.max(initial=0):
        later = np.zeros_like(total)
        later[:-reach] = total[reach:]
        total = total + decay**reach * np.where(remaining >= reach, later, 0.0)
        reach *= 2
    return total
