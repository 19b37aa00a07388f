"""Policy gradient: a ratio, a surrogate of it, and terms added to that; the papers are settings of one objective.

Per scored token, with the advantage A, the ratio r = pi / old, and ``sg`` for "no gradient":

    loss = tis * surrogate(r, A) + kl_coef * KL(pi || ref) - entropy_coef * H(pi)

    clip       -min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A)    PPO (Schulman et al., 2017,
                                                                            arXiv:1707.06347), eq. 7
                          and if A < 0 no more than -dual_clip A                       Ye et al., 2020, arXiv:1912.09729
    cispo      -sg(clip(r, 1 - clip_eps_low, 1 + clip_eps_high)) A log pi   MiniMax-M1, 2025, arXiv:2506.13585
    reinforce  -A log pi                                                    Williams, 1992

    surrogate_level=sequence: r of a token is sg(exp(mean over the sequence of log pi - log old)) * pi / sg(pi): GSPO's
    sequence ratio (Zheng et al., 2025, arXiv:2507.18071, eq. 5-7), as its authors write it for advantages per token
    (GSPO-token); for one advantage per sequence the two have the same value and gradient. The mean is weighed by the
    loss mask.

``tis`` is old / rollout, the ratio of a token that an engine sampled or of its sequence, truncated or masked outside
``tis_floor`` and ``tis_cap``; off-policy sequence masking omits tokens of A < 0 in sequences whose mean of log rollout
- log pi is above ``off_policy_mask``. A sequence is a rollout or one turn of it (``ratio_level``), whether its turns
are one sample or many.

Legend: P padded tokens, K scored tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.objectives.advantages import (
    ADVANTAGES,
    Advantage,
    Alone,
    Rewards,
    gae,
    reward_advantages,
    token_rewards,
    whiten,
)
from mcore_prefix_tree.objectives.kl import LOG_RATIO_LIMIT, KLEstimator, KLPenalty, kl_estimate
from mcore_prefix_tree.objectives.metrics import LossOutput, Means, first_bad_sample, weighted_mean
from mcore_prefix_tree.objectives.objective import STRICT, TokenObjective, refuse_unused
from mcore_prefix_tree.objectives.scored import By, Float64Array, ScoredTokens, counted_as_one, normalise, rollout_keys
from mcore_prefix_tree.objectives.scored_rows import Rows, Targets, Terms
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import GroupedBy
from mcore_prefix_tree.utils.lazy_torch import torch

Level = Literal["token", "sequence"]


def log_ratio(logprob: torch.Tensor, old: torch.Tensor, rows: Rows, level: Level) -> torch.Tensor:
    """Return ``[K]``: log of each token's ratio, cut at +-LOG_RATIO_LIMIT, beyond which it has no gradient."""
    ratio = logprob - old
    if level == "sequence":
        of_sequence = _mean_of_sequence(ratio.detach(), rows)
        ratio = of_sequence + (logprob - logprob.detach())  # in this order: the second is exactly 0
    return ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean_of_sequence(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return ``[K]``: the mean over each token's sequence, weighted by the loss mask; 0 if the masks add up to 0."""
    mask = rows.columns["loss_mask"].to(values.dtype)
    total = rows.sum_of_unit(mask)
    return rows.sum_of_unit(mask * values) / total.masked_fill(total == 0, 1.0)


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, dual: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[K]`` losses, and bool ``[K]``, whether clipping removed the gradient."""
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    loss, active = torch.maximum(plain, clipped), clipped > plain
    if dual is not None:
        bound = -dual * advantage
        active = active | ((advantage < 0) & (loss > bound))
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return loss, active


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyGradient(TokenObjective):
    """Policy gradient on the log-probabilities of sampled tokens; see the formulas above.

    Attributes:
        advantage: one of :data:`~mcore_prefix_tree.objectives.advantages.ADVANTAGES`: ``given`` by the samples,
            computed from their rewards, or from rewards and values (``gae``).
        advantage_eps: number added to the standard deviation; advantages of equal rewards are 0 without it too.
        alone: treatment of a group of a single rollout, which a baseline of the group has nothing to compare with:
            ``error``, or ``zero`` for an advantage of 0.
        whiten: whether to normalise the advantages over the step's tokens.
        gamma: discount, for ``gae``.
        lam: lambda, for ``gae``.
        surrogate: surrogate of the ratio, see above.
        surrogate_level: whether the surrogate's ratio is that of a token or of its entire sequence.
        ratio_level: sequence of all ratios of sequences (``surrogate_level``, ``tis_level``, ``kl_importance``) and of
            ``off_policy_mask``: an entire ``rollout``, or each ``turn``, whether turns are samples or not.
        clip_eps_low: largest distance below 1 at which the ratio counts.
        clip_eps_high: largest distance above 1 at which the ratio counts.
        dual_clip: factor of the bound on the loss if A < 0, see above; greater than 1. None sets no bound.
        on_policy: whether the tokens were sampled from the very weights that this step starts from and are used once:
            the current log-probabilities stand for the old ones, and samples need none.
        tis_cap: largest importance weight; None disables such weights.
        tis_floor: smallest importance weight.
        tis_level: whether the importance weight is that of a token or of its entire sequence.
        tis_mode: treatment of a weight out of bounds.
        off_policy_mask: threshold of off-policy sequence masking; None disables it. It reads ``rollout_logprobs``; if
            no engine reported any, write ``old_logprobs`` there.
        kl_coef: coefficient of the divergence from the reference policy.
        kl_estimator: estimator of the divergence, see :mod:`mcore_prefix_tree.objectives.kl`; None is ``k3`` in the
            loss and ``k1`` in the reward.
        kl_in: place of the divergence: ``loss`` differentiates it; ``reward`` subtracts it, between the old and the
            reference policy, from the rewards.
        kl_importance: ratio that multiplies the estimator in the loss: that of the ``token``, or that of its entire
            ``sequence``, exp of the mean of log pi - log old; the ratio is differentiated too, also with on_policy.
        entropy_coef: coefficient of the entropy of the distribution that each token is drawn from.
        normalise: unit that the mean is over; see :func:`~mcore_prefix_tree.objectives.scored.normalise`.
        normalise_length: constant of ``sample_sum``.
        filter_groups: whether to leave groups of equal rewards, whose advantages are 0, out of the loss: out of its
            divisor, and out of its divergence and entropy.
    """

    advantage: Advantage = "group_mean_std"
    advantage_eps: NonNegativeFloat = 1e-6
    alone: Alone = "error"
    whiten: bool = False
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    surrogate_level: Level = "token"
    ratio_level: Literal["rollout", "turn"] = "rollout"
    clip_eps_low: float = Field(default=0.2, ge=0, le=1)
    clip_eps_high: NonNegativeFloat = 0.2
    dual_clip: float | None = Field(default=None, gt=1)
    on_policy: bool = False
    tis_cap: PositiveFloat | None = None
    tis_floor: NonNegativeFloat = 0.0
    tis_level: Level = "token"
    tis_mode: Literal["truncate", "mask"] = "truncate"
    off_policy_mask: PositiveFloat | None = None
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: KLEstimator | None = None
    kl_in: Literal["loss", "reward"] = "loss"
    kl_importance: Level | None = None
    entropy_coef: float = 0.0
    normalise: By = "sample"
    normalise_length: PositiveFloat | None = None
    filter_groups: bool = False
    reports_entropy: ClassVar[bool] = True
    starts_from_policy: ClassVar[bool] = True
    remedies: ClassVar[Mapping[str, str]] = {
        "old_logprobs": "set the option on_policy=true if a step's samples were drawn with the weights it starts from"
    }

    def __post_init__(self) -> None:
        estimator = ADVANTAGES[self.advantage]
        divides = self.whiten or estimator.deviation is not None
        has_ratio = self.surrogate != "reinforce"
        refuse_unused(
            self,
            [
                ("advantage_eps", divides, "whiten=true or an advantage that divides by a deviation"),
                ("alone", estimator.compares, "an advantage that compares the rollouts of a group"),
                ("gamma", self.advantage == "gae", "advantage=gae"),
                ("lam", self.advantage == "gae", "advantage=gae"),
                ("surrogate_level", has_ratio, "surrogate=clip or surrogate=cispo"),
                ("ratio_level", self._reads_sequences, "surrogate_level=sequence, or another ratio of sequences"),
                ("clip_eps_low", has_ratio, "surrogate=clip or surrogate=cispo"),
                ("clip_eps_high", has_ratio, "surrogate=clip or surrogate=cispo"),
                ("dual_clip", self.surrogate == "clip", "surrogate=clip"),
                ("tis_floor", self.tis_cap is not None, "tis_cap"),
                ("tis_level", self.tis_cap is not None, "tis_cap"),
                ("tis_mode", self.tis_cap is not None, "tis_cap"),
                ("kl_importance", self.kl_in == "loss", "kl_in=loss"),
                ("normalise_length", self.normalise == "sample_sum", "normalise=sample_sum"),
                ("filter_groups", estimator.compares, "an advantage that compares the rollouts of a group"),
            ],
        )
        if self.tis_cap is not None and self.tis_floor > self.tis_cap:
            raise ValueError(f"tis_floor={self.tis_floor} is above tis_cap={self.tis_cap}")
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_importance:
            raise ValueError(
                "kl_estimator=k1 has no expected gradient in the loss; set kl_estimator=k2, kl_importance=token or "
                "kl_in=reward"
            )
        if self.kl_coef and self.kl_in == "reward" and self.advantage == "given":
            raise ValueError("kl_in=reward changes rewards, but advantage=given does not read them; set kl_in=loss")

    @property
    def estimator(self) -> KLEstimator:
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    @property
    def grouped_by(self) -> GroupedBy | None:
        penalised = bool(self.kl_coef) and self.kl_in == "reward"
        units = {ADVANTAGES[self.advantage].grouped_by(penalised=penalised), counted_as_one(self.normalise)}
        if self._reads_sequences and self.ratio_level == "rollout":
            units.add("rollout")
        return "group" if "group" in units else "rollout" if "rollout" in units else None

    @property
    def sums_edges(self) -> bool:
        """Return whether no ratio of the current policy is of a whole sequence."""
        return self.terms == "row"

    @property
    def terms(self) -> Terms:
        of_sequence = (
            "sequence" in (self.surrogate_level, self.kl_importance)
            or self.off_policy_mask is not None
            or (self.on_policy and self.tis_level == "sequence")
        )
        return "sample" if of_sequence else "row"

    @property
    def _reads_sequences(self) -> bool:
        return self.terms == "sample" or self.tis_level == "sequence"

    def together(self, samples: Sequence[Sample]) -> list[Hashable] | None:
        """Return the rollout of each sample if the loss reads whole rollouts, and one has several samples."""
        keys = rollout_keys(samples) if self.terms == "sample" and self.ratio_level == "rollout" else []
        return keys if len(set(keys)) < len(keys) else None

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute advantages, weights and columns of a step, on the host; raises SampleError for a missing field."""
        scored = ScoredTokens.of(samples)
        normalised = normalise(scored, self.normalise, length=self.normalise_length)
        columns = {name: scored.column(name, setting) for name, setting in self._needed().items()}
        if self.terms == "sample":
            columns["loss_mask"] = scored.mask
        sequence = scored.sequence(self.ratio_level) if self._reads_sequences else scored.sample
        # A rollout joins samples, and a turn is a part of one: as many are the same.
        is_sample = self.terms == "row" or np.count_nonzero(np.bincount(sequence)) == np.count_nonzero(scored.lens)
        if self.tis_level == "sequence" and not self.on_policy:  # of the step, so that its turns may lie apart
            difference = columns["old_logprobs"].astype(np.float64) - columns["rollout_logprobs"]
            columns["sequence_tis"] = np.bincount(sequence, weights=difference)[sequence]
        kl = None
        if self.kl_coef and self.kl_in == "reward":
            kl = KLPenalty.of(scored, self.kl_coef, self.estimator, "kl_in=reward")
        advantage, rewards = self._advantages(scored, kl)
        metrics = {} if kl is None else kl.metrics
        metrics |= {
            "advantage": (float(advantage.sum()), float(len(advantage))),
            "zero_advantage": (float(np.count_nonzero(advantage == 0)), float(len(advantage))),
        }
        if rewards is not None and self.filter_groups:
            normalised = normalised.without(scored, rewards.is_equal[rewards.group_of_value[rewards.of_token]])
            metrics["filtered_groups"] = (float(rewards.is_equal.sum()), float(len(rewards.is_equal)))
        # Once per rollout, however many samples it was cut into.
        given = zip(rollout_keys(samples), (sample.signals.reward for sample in samples), strict=True)
        of_rollouts = {key: float(np.sum(reward)) for key, reward in given if reward is not None}
        if of_rollouts:
            metrics["reward"] = (sum(of_rollouts.values()), float(len(of_rollouts)))
        return Targets(
            scored=scored,
            weight=normalised.weight,
            count=normalised.count,
            columns=columns | {"advantage": advantage},
            unit=None if is_sample else sequence,
            metrics=metrics,
        )

    def _needed(self) -> dict[str, str]:
        """Return the columns that the loss reads on the device, each with the setting that needs it."""
        needed = {}
        reads_ratio = self.surrogate != "reinforce" or (self.kl_importance and self.kl_coef)
        if not self.on_policy and (reads_ratio or self.tis_cap is not None):
            needed["old_logprobs"] = "this objective without on_policy=true"
        if self.kl_coef and self.kl_in == "loss":
            needed["ref_logprobs"] = f"kl_coef={self.kl_coef}"
        for name in ("tis_cap", "off_policy_mask"):
            if getattr(self, name) is not None:
                needed.setdefault("rollout_logprobs", f"{name}={getattr(self, name)}")
        return needed

    def _advantages(self, scored: ScoredTokens, kl: KLPenalty | None) -> tuple[Float64Array, Rewards | None]:
        """Return ``[K]`` advantages, and the rewards that they compare or come from."""
        setting = f"advantage={self.advantage}"
        penalty = None if kl is None else kl.of_token
        estimator, collected = ADVANTAGES[self.advantage], None
        if estimator.reads == "advantage":
            advantage = scored.column("advantage", setting).astype(np.float64)
        elif estimator.reads == "values":
            rewards = token_rewards(scored, setting, penalty=penalty)
            values = scored.column("values", setting).astype(np.float64)
            advantage, _ = gae(scored, rewards, values, gamma=self.gamma, lam=self.lam)
        else:
            collected = Rewards.of(scored, setting=setting, grouped=estimator.compares, penalty=penalty)
            advantage = reward_advantages(scored, collected, estimator, eps=self.advantage_eps, alone=self.alone)
        return whiten(advantage, eps=self.advantage_eps) if self.whiten else advantage, collected

    def loss(self, logprob: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> LossOutput:
        """Return the weighted sum over a micro-batch; ``logprob`` is ``[P]``, each token's at its own flat index.

        ``entropy`` is ``[P]``, of the distribution that each token predicts; ValueError if ``entropy_coef`` needs it.
        """
        scored = logprob[rows.token]
        dtype = scored.dtype
        column = {name: values.to(dtype) for name, values in rows.columns.items()}
        old = scored.detach() if self.on_policy or "old_logprobs" not in column else column["old_logprobs"]
        metrics: Means = {}

        per_token, ratio_metrics = self._surrogate(scored, old, column["advantage"], rows)
        metrics |= ratio_metrics
        if self.tis_cap is not None:
            weight, outside = self._weigh_importance(old, column["rollout_logprobs"], rows, self.tis_cap)
            per_token = per_token * weight
            metrics |= {"tis_weight": weighted_mean(weight), "tis_outside": weighted_mean(outside)}
        if self.off_policy_mask is not None:
            drift = _mean_of_sequence(column["rollout_logprobs"] - scored.detach(), rows)
            is_far = (column["advantage"] < 0) & (drift > self.off_policy_mask)
            per_token = per_token.masked_fill(is_far, 0.0)
            metrics["off_policy_masked"] = weighted_mean(is_far)
        if "ref_logprobs" in column:
            divergence = kl_estimate(scored, column["ref_logprobs"], self.estimator)
            if self.kl_importance == "token":
                divergence = divergence * log_ratio(scored, old, rows, "token").exp()
            elif self.kl_importance == "sequence":
                # Not the ratio of the surrogate: this one spreads its gradient evenly over the sequence, as TRL's does.
                of_sequence = _mean_of_sequence(scored - old, rows).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
                divergence = divergence * of_sequence.exp()
            per_token = per_token + self.kl_coef * divergence
            metrics["kl"] = weighted_mean(kl_estimate(scored, column["ref_logprobs"], "k3"))
        if entropy is not None:
            of_token = entropy[rows.predictor].to(dtype)
            metrics["entropy"] = weighted_mean(of_token)
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * of_token
        elif self.entropy_coef:
            raise ValueError(f"entropy_coef={self.entropy_coef} needs the entropy, and none is given")
        return LossOutput(
            loss=torch.dot(per_token, rows.weight.to(dtype)),
            metrics=metrics,
            bad_sample=first_bad_sample(scored, rows.sample),
        )

    def _weigh_importance(
        self, old: torch.Tensor, rollout: torch.Tensor, rows: Rows, cap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[K]`` weights without a gradient, and bool ``[K]``, whether the ratio was out of bounds."""
        difference = (old - rollout).detach()
        if self.tis_level == "sequence":  # without the loss mask, which has nothing to do with sampling
            known = rows.columns.get("sequence_tis")
            difference = rows.sum_of_unit(difference) if known is None else known.to(difference.dtype)
        ratio = difference.clamp(max=LOG_RATIO_LIMIT).exp()
        outside = (ratio < self.tis_floor) | (ratio > cap)
        is_cut = self.tis_mode == "truncate"
        return ratio.clamp(self.tis_floor, cap) if is_cut else ratio.masked_fill(outside, 0.0), outside

    def _surrogate(
        self, logprob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, Means]:
        """Return losses ``[K]`` from log-probabilities and advantages ``[K]``, and the metrics of the ratio."""
        if self.surrogate == "reinforce":
            return -advantage * logprob, {}
        log_of_ratio = log_ratio(logprob, old, rows, self.surrogate_level)
        is_of_token = self.surrogate_level == "token"
        of_token = log_of_ratio.detach() if is_of_token else log_ratio(logprob.detach(), old, rows, "token")
        ratio = log_of_ratio.exp()
        if self.surrogate == "clip":
            loss, clipped = clipped_surrogate(ratio, advantage, self.clip_eps_low, self.clip_eps_high, self.dual_clip)
        else:
            weight = ratio.detach().clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high)
            loss, clipped = -weight * advantage * logprob, weight != ratio
        return loss, {
            "ratio": weighted_mean(ratio),
            "clip_fraction": weighted_mean(clipped),
            # k3 of KL(old || pi), from tokens drawn from old: how far the policy has moved. Per token, also if the
            # ratio is per sequence: there the tokens' moves cancel.
            "kl_old": weighted_mean(torch.expm1(of_token) - of_token),
        }


PRESETS: dict[str, dict[str, Any]] = {
    "reinforce": {"advantage": "reward", "surrogate": "reinforce", "normalise": "sample_sum"},
    "rloo": {"advantage": "leave_one_out", "surrogate": "reinforce", "normalise": "sample_sum"},
    "ppo": {"advantage": "gae", "whiten": True, "normalise": "token"},
    "grpo": {"advantage": "group_mean_std", "normalise": "sample"},
    "dr_grpo": {"advantage": "group_mean", "normalise": "sample_sum"},
    # Yu et al., 2025, arXiv:2503.14476; the mean over all tokens of the step is that of verl and TRL, the paper's is
    # over each group's (normalise=group).
    "dapo": {"advantage": "group_mean_std", "clip_eps_high": 0.28, "normalise": "token"},
    "gspo": {
        "advantage": "group_mean_std",
        "surrogate_level": "sequence",
        "clip_eps_low": 3e-4,
        "clip_eps_high": 4e-4,
        "normalise": "rollout",
    },
    "cispo": {
        "advantage": "group_mean_std",
        "surrogate": "cispo",
        "clip_eps_low": 1.0,  # no lower bound, as in the paper
        "clip_eps_high": 4.0,  # a weight of at most 5, as in ScaleRL (Khatri et al., 2025, arXiv:2510.13786)
        "normalise": "token",
    },
}
