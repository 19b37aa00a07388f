"""The one normaliser: the weight of each scored token, and the divisor of the entire step.

A step's loss is ``sum over scored tokens of weight * loss / divisor``. The weights are set on the host from all samples
of the step, and the divisor is an integer that every sample adds its part to. So a micro-batch returns the sum of its
own tokens and of its own samples' parts, however the step is cut; Megatron-Core adds both up over micro-batches and
data-parallel ranks and divides once, as it does by the number of tokens (``calculate_per_token_loss=True``).

The loss mask multiplies a token's loss; it does not change the divisor, which counts tokens with a mask that is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.objectives.scored import Float64Array, Int64Array, ScoredTokens, numbered, rollout_keys

# Means over units of several samples, which all have to be in one step.
Unit = Literal["rollout", "group"]
By = Literal["token", "sample", "sample_sum", Unit]


@dataclass(frozen=True, kw_only=True, eq=False)
class Normalised:
    """Weight of each scored token's loss, float64 ``[K]``, and each sample's part of the divisor, int64 ``[S]``."""

    weight: Float64Array
    count: Int64Array

    def without(self, scored: ScoredTokens, left_out: npt.NDArray[np.bool_]) -> Normalised:
        """Leave whole samples and units out, of which ``left_out``, bool ``[K]``, has the tokens."""
        count = self.count.copy()
        count[scored.sample[left_out]] = 0
        return Normalised(weight=np.where(left_out, 0.0, self.weight), count=count)


def counted_as_one(by: By) -> Unit | None:
    """Return the unit that a normaliser counts once however many samples it has, or None if it counts samples."""
    return next((unit for unit in get_args(Unit) if unit == by), None)


def normalise(scored: ScoredTokens, by: By, *, length: float | None = None) -> Normalised:
    """Weigh the scored tokens of a step.

    Args:
        by: ``token``: the mean over all tokens (verl's ``token-mean``). ``sample``: the mean over samples of the mean
            over each one's tokens (GRPO; ``seq-mean-token-mean``). ``rollout``: the mean over rollouts of the mean over
            all tokens of each, the same whether its turns are one sample or many; a sample without ``rollout`` is a
            separate rollout. ``group``: the mean over groups of the mean over all tokens of each. ``sample_sum``: the
            mean over samples of the sum over each one's tokens (``seq-mean-token-sum``), divided by ``length`` if that
            is given (Dr. GRPO, TRL's ``dr_grpo``, ``seq-mean-token-sum-norm``; after verl 0.9.1 that divides by its
            length and not by the number of samples). Samples, rollouts and groups without a scored token do not count.
        length: the constant of ``sample_sum``, usually the longest completion allowed; 1 by default.

    Raises:
        SampleError: ``by`` is ``group``, and a sample has none.
    """
    lens = scored.lens
    has_tokens = (lens > 0).astype(np.int64)
    if by == "token":
        return Normalised(weight=scored.mask, count=lens)
    if by == "sample":
        return Normalised(weight=scored.mask / lens[scored.sample], count=has_tokens)
    if by == "sample_sum":
        return Normalised(weight=scored.mask / (length or 1.0), count=has_tokens)
    counted = np.flatnonzero(lens)
    if by == "rollout":
        of_all = rollout_keys(scored.samples)
        keys = [of_all[index] for index in counted.tolist()]
    else:
        keys = [scored.required(index, "group", "normalise=group") for index in counted.tolist()]
    unit = np.full(len(lens), -1, dtype=np.int64)
    unit[counted] = numbered(keys)
    per_unit = np.bincount(unit[scored.sample])
    count = np.zeros_like(lens)
    count[counted[np.unique(unit[counted], return_index=True)[1]]] = 1  # with its first sample
    return Normalised(weight=scored.mask / per_unit[unit[scored.sample]], count=count)
