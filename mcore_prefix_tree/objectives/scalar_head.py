"""Losses on a scalar head: a critic's value at every scored token, a reward model's score at the end of a sample.

Legend: P padded tokens, K scored tokens, S samples, Q pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.objectives.advantages import gae, token_rewards
from mcore_prefix_tree.objectives.kl import KLEstimator, KLPenalty
from mcore_prefix_tree.objectives.metrics import LossOutput, Means, first_bad_sample, weighted_mean
from mcore_prefix_tree.objectives.objective import STRICT, SummedObjective, TokenObjective, refuse_unused
from mcore_prefix_tree.objectives.preference import find_pairs, reward_means
from mcore_prefix_tree.objectives.scored import By, ScoredTokens, normalise, refuse_routes
from mcore_prefix_tree.objectives.scored_rows import Rows, Targets
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import GroupedBy
from mcore_prefix_tree.utils.lazy_torch import F, torch


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Critic(SummedObjective):
    """Regression of values on returns, clipped around the old values as in PPO's reference implementation.

    Per scored token, with the value V of the state that the token is chosen in, that is, at its predictor:

        1/2 max((V - R)^2, (clip(V, old - clip_eps, old + clip_eps) - R)^2)

    (Schulman et al., 2016, arXiv:1506.02438, section 5, without the clipping; the clipping is that of OpenAI Baselines'
    ``ppo2``, TRL's and verl's ``cliprange_value``.)

    Attributes:
        clip_eps: clipping distance, see above; None does not clip.
        returns: source of the returns: ``given`` by the samples, or ``gae`` from their rewards and old values.
        gamma: discount, for ``gae``.
        lam: lambda, for ``gae``.
        kl_coef: coefficient of the divergence from the reference policy that is subtracted from the rewards, for
            ``gae``: that of the policy which this critic advises, if it has ``kl_in=reward``.
        kl_estimator: estimator of that divergence, likewise; see :mod:`mcore_prefix_tree.objectives.kl`.
        normalise: unit that the mean is over; see :func:`~mcore_prefix_tree.objectives.scored.normalise`.
    """

    clip_eps: PositiveFloat | None = 0.2
    returns: Literal["given", "gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: KLEstimator = "k1"
    normalise: By = "token"
    has_scalar_head: ClassVar[bool] = True
    scored_as: ClassVar[str] = "values"

    def __post_init__(self) -> None:
        settings = ("gamma", "lam", "kl_coef", "kl_estimator")
        refuse_unused(self, [(name, self.returns == "gae", "returns=gae") for name in settings])

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute returns, old values and weights of a step, on the host; raises SampleError for a missing field."""
        refuse_routes(samples, "a critic")
        scored = ScoredTokens.of(samples)
        normalised = normalise(scored, self.normalise)
        columns = {}
        if self.returns == "gae" or self.clip_eps is not None:
            columns["values"] = scored.column("values", "a critic")
        if self.returns == "gae":
            kl = KLPenalty.of(scored, self.kl_coef, self.kl_estimator, "kl_coef") if self.kl_coef else None
            rewards = token_rewards(scored, "returns=gae", penalty=None if kl is None else kl.of_token)
            values = columns["values"].astype(np.float64)
            _, columns["returns"] = gae(scored, rewards, values, gamma=self.gamma, lam=self.lam)
        else:
            columns["returns"] = scored.column("returns", "returns=given")
        return Targets(scored=scored, weight=normalised.weight, count=normalised.count, columns=columns)

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> LossOutput:
        """Return the weighted sum over a micro-batch; ``scores`` is ``[P]``, the values after each token."""
        predicted = scores[rows.predictor]
        dtype = predicted.dtype
        returns = rows.columns["returns"].to(dtype)
        loss = (predicted - returns).square()
        metrics: Means = {
            "value": weighted_mean(predicted),
            "return": weighted_mean(returns),
            "value_error": weighted_mean(loss),
        }
        if self.clip_eps is not None:
            old = rows.columns["values"].to(dtype)
            clipped = (predicted.clamp(old - self.clip_eps, old + self.clip_eps) - returns).square()
            metrics["clip_fraction"] = weighted_mean(clipped > loss)
            loss = torch.maximum(loss, clipped)
        return LossOutput(
            loss=torch.dot(loss, rows.weight.to(dtype)) / 2,
            metrics=metrics,
            bad_sample=first_bad_sample(predicted, rows.sample),
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModel(TokenObjective):
    """Bradley-Terry loss of pairs: ``-log sigma(r(chosen) - r(rejected)) + center_coef (r(chosen) + r(rejected))^2``.

    r is the score after the sample's last token (Ouyang et al., 2022, arXiv:2203.02155, eq. 1); the second term keeps
    the scores around 0 (Eisenstein et al., 2023, arXiv:2312.09244, eq. 2). The step's loss is the mean over pairs.

    Attributes:
        center_coef: coefficient of the second term, see above; 0 omits the term.
    """

    center_coef: NonNegativeFloat = 0.0
    has_scalar_head: ClassVar[bool] = True
    scored_as: ClassVar[str] = "reward"
    grouped_by: ClassVar[GroupedBy | None] = "pair"

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute the pairs of a step, on the host; raises SampleError as :func:`find_pairs` does."""
        refuse_routes(samples, "a reward model")
        pairs = find_pairs(samples, "a reward model")
        count = np.zeros(len(samples), dtype=np.int64)
        count[pairs[:, 0]] = 1
        scored = ScoredTokens.of(samples)
        return Targets(scored=scored, weight=scored.mask, count=count, pairs=pairs)

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> LossOutput:
        """Return the sum over the pairs of a micro-batch; ``scores`` is ``[P]``, after each token."""
        score = scores[rows.last]
        chosen, rejected = score[rows.pairs[:, 0]], score[rows.pairs[:, 1]]
        loss = -F.logsigmoid(chosen - rejected)
        if self.center_coef:
            loss = loss + self.center_coef * (chosen + rejected).square()
        sample_scores = torch.arange(rows.num_samples, device=score.device)
        return LossOutput(
            loss=loss.sum(), metrics=reward_means(chosen, rejected), bad_sample=first_bad_sample(score, sample_scores)
        )
