"""Preferences between the two completions of a pair, both in one micro-batch.

With s(y) the sum over a completion's scored tokens of ``mask (log pi - log ref)`` (``reference``) or ``mask log pi``,
divided by the sum of its masks if ``average``, and D = s(chosen) - s(rejected), the loss of a pair is

    sigmoid     -(1 - label_smoothing) log sigma(beta D - gamma) - label_smoothing log sigma(-(beta D - gamma))
    hinge       max(0, 1 - beta D)
    ipo         (D - 1 / (2 beta))^2
    odds_ratio  -beta log sigma(log odds(chosen) - log odds(rejected)),  log odds = s - log(1 - exp(s))

plus nll_coef times the mean negative log-likelihood of the chosen completion. So DPO (Rafailov et al., 2023,
arXiv:2305.18290, eq. 7) is sigmoid with a reference, label_smoothing is conservative DPO (Mitchell, 2023), IPO (Azar et
al., 2024, arXiv:2310.12036, eq. 17) is ipo with a reference, averaged as its authors did (TRL's ``ipo``), SimPO (Meng
et al., 2024, arXiv:2405.14734, eq. 6) is sigmoid without a reference, averaged, with a margin gamma, and ORPO (Hong et
al., 2024, arXiv:2403.07691, eq. 6-7) is odds_ratio without a reference, averaged, with nll_coef=1. The step's loss is
the mean over pairs.

Legend: P padded tokens, K scored tokens, S samples, Q pairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.objectives.metrics import LossOutput, Means, first_bad_sample, weighted_mean
from mcore_prefix_tree.objectives.objective import STRICT, TokenObjective, refuse_unused
from mcore_prefix_tree.objectives.scored import Int64Array, ScoredTokens
from mcore_prefix_tree.objectives.scored_rows import Rows, Targets, Terms
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import GroupedBy, SampleError
from mcore_prefix_tree.utils.lazy_torch import F, torch


def find_pairs(samples: Sequence[Sample], setting: str) -> Int64Array:
    """Return int64 ``[Q, 2]``: the chosen and the rejected sample per pair, in the order in which pairs first appear.

    Raises:
        SampleError: a sample without ``pair``, without its partner in the step, or a second chosen or rejected one.
    """
    sides: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        signals = sample.signals
        if signals.pair is None:
            raise SampleError(f"{sample.source}: field 'pair' is missing, and {setting} needs it")
        own = sides.setdefault(signals.pair, [-1, -1])
        side = 0 if signals.chosen else 1
        if own[side] >= 0:
            role = "chosen" if signals.chosen else "rejected"
            raise SampleError(
                f"{sample.source}: pair {signals.pair!r} already has a {role} sample, "
                f"{samples[own[side]].source}; give every pair its own id"
            )
        own[side] = index
    for pair, own in sides.items():
        if min(own) < 0:
            raise SampleError(
                f"{samples[max(own)].source}: the partner of pair {pair!r} is not in this step; both sides must be in "
                "the same one"
            )
    return np.array(list(sides.values()), dtype=np.int64).reshape(-1, 2)


def pair_targets(samples: Sequence[Sample], setting: str, reference: bool) -> Targets:
    """Make the targets of a step of pairs: every pair counts 1 towards the divisor, with its chosen sample."""
    scored = ScoredTokens.of(samples)
    pairs = find_pairs(samples, setting)
    for index in np.flatnonzero(scored.lens == 0).tolist():
        raise SampleError(f"{samples[index].source}: no token is scored, and {setting} compares completions")
    count = np.zeros(len(samples), dtype=np.int64)
    count[pairs[:, 0]] = 1
    columns = {"ref_logprobs": scored.column("ref_logprobs", setting)} if reference else {}
    return Targets(scored=scored, weight=scored.mask, count=count, columns=columns, pairs=pairs)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Preference(TokenObjective):
    """Loss on pairs of completions; see the formulas above.

    Attributes:
        link: function of a pair's difference.
        beta: beta, see above; ORPO's lambda.
        gamma: margin of ``sigmoid``.
        label_smoothing: probability that a pair is the wrong way round, for ``sigmoid``.
        reference: whether to compare with the reference policy's log-probabilities.
        average: whether to average over the tokens of a completion, instead of their sum.
        nll_coef: coefficient of the negative log-likelihood of the chosen completion, per token.
    """

    link: Literal["sigmoid", "hinge", "ipo", "odds_ratio"] = "sigmoid"
    beta: PositiveFloat = 0.1
    gamma: float = 0.0
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    reference: bool = True
    average: bool = False
    nll_coef: NonNegativeFloat = 0.0
    starts_from_policy: ClassVar[bool] = True
    terms: ClassVar[Terms] = "pair"
    grouped_by: ClassVar[GroupedBy | None] = "pair"

    def __post_init__(self) -> None:
        if self.link == "odds_ratio" and (self.reference or not self.average):
            raise ValueError("link=odds_ratio takes probabilities: set reference=false and average=true")
        is_sigmoid = self.link == "sigmoid"
        refuse_unused(self, [("gamma", is_sigmoid, "link=sigmoid"), ("label_smoothing", is_sigmoid, "link=sigmoid")])

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute pairs and columns of a step, on the host; raises SampleError as :func:`find_pairs` does."""
        return pair_targets(samples, "a preference objective", self.reference)

    def loss(self, logprob: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> LossOutput:
        """Return the sum over the pairs of a micro-batch; ``logprob`` is ``[P]``."""
        scored = logprob[rows.token]
        weight = rows.weight.to(scored.dtype)
        total_weight = rows.sum_per_sample(weight)
        relative = scored - rows.columns["ref_logprobs"].to(scored.dtype) if self.reference else scored
        score = rows.sum_per_sample(weight * relative)
        if self.average:
            score = score / total_weight
        chosen, rejected = score[rows.pairs[:, 0]], score[rows.pairs[:, 1]]
        loss = self._of_pairs(chosen, rejected)
        mean_nll = (-rows.sum_per_sample(weight * scored) / total_weight)[rows.pairs[:, 0]]
        if self.nll_coef:
            loss = loss + self.nll_coef * mean_nll
        return LossOutput(
            loss=loss.sum(),
            metrics=reward_means(self.beta * chosen, self.beta * rejected) | {"chosen_nll": weighted_mean(mean_nll)},
            bad_sample=first_bad_sample(scored, rows.sample),
        )

    def _of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the losses ``[Q]`` of pairs from s ``[Q]`` of each side."""
        difference = chosen - rejected
        if self.link == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        if self.link == "hinge":
            return F.relu(1 - self.beta * difference)
        if self.link == "odds_ratio":
            from mcore_prefix_tree.logprob.softmax import log1mexp

            return -self.beta * F.logsigmoid(difference - log1mexp(chosen) + log1mexp(rejected))
        logits = self.beta * difference - self.gamma
        return -(1 - self.label_smoothing) * F.logsigmoid(logits) - self.label_smoothing * F.logsigmoid(-logits)


def reward_means(chosen: torch.Tensor, rejected: torch.Tensor) -> Means:
    """Return the metrics of pairs, from ``[Q]`` rewards of each side."""
    return {
        "reward_chosen": weighted_mean(chosen),
        "reward_rejected": weighted_mean(rejected),
        "accuracy": weighted_mean(chosen > rejected),
        "margin": weighted_mean(chosen - rejected),
    }


PRESETS: dict[str, dict[str, Any]] = {
    "dpo": {"link": "sigmoid", "beta": 0.1},
    "ipo": {"link": "ipo", "beta": 0.1, "average": True},
    "simpo": {"link": "sigmoid", "beta": 2.0, "gamma": 1.0, "reference": False, "average": True},
    "orpo": {"link": "odds_ratio", "beta": 0.1, "reference": False, "average": True, "nll_coef": 1.0},
}
