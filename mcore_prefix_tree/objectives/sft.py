"""Supervised fine-tuning: the weighted negative log-likelihood of every scored token of every sample."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.objectives.metrics import LossOutput, first_bad_sample, weighted_mean
from mcore_prefix_tree.objectives.objective import STRICT, Output, SummedObjective, refuse_unused
from mcore_prefix_tree.objectives.scored import By, ScoredTokens, normalise
from mcore_prefix_tree.objectives.scored_rows import Rows, Targets
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.utils.lazy_torch import torch


def sft_loss(logprob: torch.Tensor, loss_weight: torch.Tensor) -> torch.Tensor:
    """Return the scalar ``- sum_t w_t log p_t`` over a micro-batch, to be divided by the step's supervised tokens.

    ``logprob`` is ``[P]``, at each token's own flat index, and ``loss_weight`` is ``[P]``, ``FlatLayout.loss_weight``.
    The loss is linear in the log-probabilities, so a shared token takes the sum of its samples' masks as its weight and
    no sample has to be restored. The denominator counts the logical tokens of the entire step, over all micro-batches
    and data-parallel ranks, that have a predictor and a non-zero mask; Megatron-Core divides by it when
    ``calculate_per_token_loss`` is set.
    """
    return -torch.dot(logprob, loss_weight.to(logprob.dtype))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedFineTuning(SummedObjective):
    """``- sum_t w_t log p_t`` with the loss mask as weight.

    Attributes:
        normalise: unit that the mean is over; see :func:`~mcore_prefix_tree.objectives.scored.normalise`.
        normalise_length: constant of ``sample_sum``.
    """

    normalise: By = "token"
    normalise_length: PositiveFloat | None = None

    def __post_init__(self) -> None:
        refuse_unused(self, [("normalise_length", self.normalise == "sample_sum", "normalise=sample_sum")])

    @property
    def output(self) -> Output:
        """Return ``weighted_sum`` for :func:`sft_loss`, whose weights the layouts have."""
        return "weighted_sum" if self.normalise == "token" else "logprobs"

    def check(self, samples: Sequence[Sample]) -> None:
        """Check samples before the first step; a weighted sum takes any but rejected answers."""
        # Token ids may carry the signals of several objectives; a record with both answers asks for a comparison.
        rejected = next((sample for sample in samples if sample.part.startswith("rejected")), None)
        if rejected is not None:
            raise SampleError(
                f"{rejected.source}: this is the rejected answer of a pair, which objective.name=sft would train on; "
                "leave it out, or compare pairs with objective.name=dpo"
            )
        if not self.is_weighted_sum:
            self.targets(samples)

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute the weights of a step, on the host; raises SampleError as :func:`normalise` does."""
        scored = ScoredTokens.of(samples)
        normalised = normalise(scored, self.normalise, length=self.normalise_length)
        return Targets(scored=scored, weight=normalised.weight, count=normalised.count)

    def loss(self, logprob: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> LossOutput:
        """Return the weighted sum over a micro-batch; ``logprob`` and ``entropy`` are ``[P]``."""
        scored = logprob[rows.token]
        metrics = {"nll": weighted_mean(-scored)}
        if entropy is not None:
            metrics["entropy"] = weighted_mean(entropy[rows.predictor])
        return LossOutput(
            loss=-torch.dot(scored, rows.weight.to(scored.dtype)),
            metrics=metrics,
            bad_sample=first_bad_sample(scored, rows.sample),
        )
