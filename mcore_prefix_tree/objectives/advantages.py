"""Advantages from rewards, on the host before a step runs: group baselines, turns, whitening.

Legend: S samples, K scored tokens, R rollouts, G groups, W rewards (one per rollout, or one per
turn of it).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.objectives.objective import known_name
from mcore_prefix_tree.objectives.scored import Float64Array, Int64Array, ScoredTokens, rollout_keys
from mcore_prefix_tree.signals import GroupedBy, SampleError


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


Alone = Literal["error", "zero"]


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """Inputs of an advantage; its computation, its checks and the assignment of samples to steps follow from them."""

    # Field of Signals that makes it; values is for GAE, which reads reward too.
    reads: Literal["advantage", "reward", "values"] = "reward"
    # Baseline subtracted from a reward: the mean of its group, or of the group's others without its own rollout's.
    baseline: Literal["group", "others"] | None = None
    # Scope of the (unbiased) standard deviation that divides the difference: its group, or all rewards of the step.
    deviation: Literal["group", "step"] | None = None

    def __post_init__(self) -> None:
        assert self.baseline is not None or self.deviation is None

    @property
    def compares(self) -> bool:
        """Return whether the estimator compares the rollouts of a group with each other."""
        return self.baseline is not None

    def grouped_by(self, *, penalised: bool) -> GroupedBy | None:
        """Return which samples must be in one step; a ``penalised`` reward depends on all tokens of its rollout."""
        if self.compares:
            return "group"
        return "rollout" if penalised and self.reads == "reward" else None


# r is the reward of a rollout.
ADVANTAGES = {
    "given": AdvantageEstimator(reads="advantage"),
    # r, as in REINFORCE (Williams, 1992).
    "reward": AdvantageEstimator(),
    # r - mean(group), as in Dr. GRPO (Liu et al., 2025, arXiv:2503.20783).
    "group_mean": AdvantageEstimator(baseline="group"),
    # (r - mean(group)) / (std(group) + eps), as in GRPO (Shao et al., 2024, arXiv:2402.03300, section 4.1.2).
    "group_mean_std": AdvantageEstimator(baseline="group", deviation="group"),
    # (r - mean(group)) / (std(step) + eps) (Liu et al., 2025, arXiv:2508.08221).
    "group_mean_batch_std": AdvantageEstimator(baseline="group", deviation="step"),
    # r - mean(group without this rollout), as in RLOO (Ahmadian et al., 2024, arXiv:2402.14740).
    "leave_one_out": AdvantageEstimator(baseline="others"),
    # From rewards and values (Schulman et al., 2016, arXiv:1506.02438).
    "gae": AdvantageEstimator(reads="values"),
}
Advantage = Annotated[str, known_name(ADVANTAGES)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """The rewards of a step, each counted once however many samples its rollout was cut into."""

    setting: str
    value: Float64Array  # float64 [W], less a penalty of the tokens that earned it
    rollout: Int64Array  # int64 [W]
    cu_turns: Int64Array  # int64 [R + 1]; rollout r has the rewards cu_turns[r]:cu_turns[r + 1]
    group: Int64Array  # int64 [R]
    first_sample: Int64Array  # int64 [R], a sample of each rollout, for messages, as setting is
    of_token: Int64Array  # int64 [K], the first reward that a scored token can have earned

    @classmethod
    def of(cls, scored: ScoredTokens, *, setting: str, grouped: bool, penalty: Float64Array | None = None) -> Rewards:
        """Collect the rewards of a step, less a penalty ``[K]``; ``grouped`` requires a ``group`` from every sample.

        Raises:
            SampleError: a sample lacks ``reward`` or ``group``; two samples of one rollout do not agree on the reward.
        """
        rollouts: dict[Hashable, int] = {}
        groups: dict[Hashable, int] = {}
        values: list[Float64Array] = []
        group: list[int] = []
        first_sample: list[int] = []
        rollout_of_sample = np.empty(len(scored.samples), dtype=np.int64)
        turn_of_sample = np.empty(len(scored.samples), dtype=np.int64)
        for index, (sample, key) in enumerate(zip(scored.samples, rollout_keys(scored.samples), strict=True)):
            signals = sample.signals
            reward = np.atleast_1d(np.asarray(scored.required(index, "reward", setting), dtype=np.float64))
            own_group = scored.required(index, "group", setting) if grouped else signals.group
            found = rollouts.setdefault(key, len(values))
            if found == len(values):
                values.append(reward)
                group.append(groups.setdefault(own_group, len(groups)))
                first_sample.append(index)
            elif not np.array_equal(values[found], reward):
                other = scored.samples[first_sample[found]].source
                raise SampleError(
                    f"{sample.source}: field 'reward' differs from that of {other}, which belongs to the same rollout "
                    f"{signals.rollout!r}; all samples of a rollout carry the same"
                )
            rollout_of_sample[index] = found
            # The turn of each token: the sample's own, or -1 to count them; a single reward is for all.
            turn_of_sample[index] = (
                0 if isinstance(signals.reward, float) else -1 if signals.turn is None else signals.turn
            )
        lens = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
        cu_turns = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lens)])
        turn = turn_of_sample[scored.sample]
        of_token = cu_turns[rollout_of_sample[scored.sample]] + np.where(turn < 0, scored.turn, turn)
        value = np.concatenate(values) if values else np.empty(0)
        if penalty is not None:
            value = value - np.bincount(of_token, weights=penalty, minlength=len(value))
        return cls(
            setting=setting,
            value=value,
            rollout=np.repeat(np.arange(len(values)), lens),
            cu_turns=cu_turns,
            group=np.array(group, dtype=np.int64),
            first_sample=np.array(first_sample, dtype=np.int64),
            of_token=of_token,
        )

    @cached_property
    def group_of_value(self) -> Int64Array:
        """Return int64 ``[W]``."""
        return self.group[self.rollout]

    @cached_property
    def is_equal(self) -> npt.NDArray[np.bool_]:
        """Return bool ``[G]``, whether a group's rewards are equal, or of one rollout: all its advantages are 0."""
        low, high = (np.full(int(self.group.max(initial=-1)) + 1, bound) for bound in (np.inf, -np.inf))
        np.minimum.at(low, self.group_of_value, self.value)
        np.maximum.at(high, self.group_of_value, self.value)
        is_equal: npt.NDArray[np.bool_] = (low == high) | (np.bincount(self.group, minlength=len(low)) == 1)
        return is_equal


def reward_advantages(
    scored: ScoredTokens, rewards: Rewards, estimator: AdvantageEstimator, *, eps: float, alone: Alone = "error"
) -> Float64Array:
    """Return the advantage of every scored token from the rewards of its rollout, float64 ``[K]``.

    With one reward per rollout, all its tokens have the advantage that :data:`ADVANTAGES` describes. With one reward
    per turn, the advantages are computed over all rewards of the group, and a token has the sum over its own and all
    later turns (the GRPO paper, section 4.1.3, process supervision); a baseline of the others excludes all turns of the
    rollout. A group of equal rewards has advantages of exactly 0. A rollout that was cut into several samples counts
    once in the mean and the deviation, and all its samples have the same advantage.

    Args:
        estimator: estimator that reads only rewards.
        eps: number added to the standard deviation.
        alone: treatment of a group of a single rollout, which has nothing to be compared with: ``error``, or ``zero``
            for advantages of 0, as if all rewards were equal.

    Raises:
        SampleError: there is a group of a single rollout, and ``alone`` is ``error``.
    """
    value = rewards.value
    if estimator.compares:
        if alone == "error":
            _check_not_alone(scored, rewards)
        value = _within_groups(rewards, estimator, eps)
    of_token: Float64Array = sums_to_go(value, rewards.cu_turns)[rewards.of_token]
    return of_token


def _check_not_alone(scored: ScoredTokens, rewards: Rewards) -> None:
    is_alone = np.bincount(rewards.group)[rewards.group] == 1
    if is_alone.any():
        sample = scored.samples[rewards.first_sample[np.argmax(is_alone)]]
        raise SampleError(
            f"{sample.source}: group {sample.signals.group!r} has only this rollout in the step, and {rewards.setting} "
            "compares the rollouts of a group; put the entire group in one step, or set alone=zero, advantage=given or "
            "advantage=reward"
        )


def _within_groups(rewards: Rewards, estimator: AdvantageEstimator, eps: float) -> Float64Array:
    """Return the advantages ``[W]`` of rewards within their groups."""
    value, group, groups = rewards.value, rewards.group_of_value, len(rewards.is_equal)
    number, total = (np.bincount(group, weights=weights, minlength=groups) for weights in (None, value))
    from_mean = value - total[group] / number[group]
    centred = from_mean
    if estimator.baseline == "others":
        own = np.bincount(rewards.rollout, weights=value)[rewards.rollout]
        others = number[group] - np.diff(rewards.cu_turns)[rewards.rollout]
        centred = value - (total[group] - own) / np.maximum(others, 1)
    centred = np.where(rewards.is_equal[group], 0.0, centred)  # exactly 0, without rounding errors
    if estimator.deviation == "group":
        variance = np.bincount(group, weights=np.square(from_mean), minlength=groups) / np.maximum(number - 1, 1)
        return _divided(centred, np.sqrt(variance)[group], eps)
    if estimator.deviation == "step" and len(value) > 1:
        return _divided(centred, value.std(ddof=1), eps)
    return centred


def whiten(advantage: Float64Array, *, eps: float) -> Float64Array:
    """Normalise ``[K]`` to mean 0 and (unbiased) standard deviation 1, as usual for PPO; equal values become 0."""
    if len(advantage) < 2 or advantage.min() == advantage.max():
        return np.zeros_like(advantage)
    return _divided(advantage - advantage.mean(), advantage.std(ddof=1), eps)


def _divided(centred: Float64Array, deviation: Float64Array | np.floating, eps: float) -> Float64Array:
    """Return ``[W]`` or ``[K]`` ``centred / (deviation + eps)``; 0 instead of 0 / 0 if nothing deviates."""
    divisor = np.broadcast_to(deviation + eps, centred.shape)
    quotient: Float64Array = np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor > 0)
    return quotient
