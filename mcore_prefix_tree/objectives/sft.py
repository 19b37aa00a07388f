"""Supervised fine-tuning: the weighted negative log-likelihood of every supervised token of every sample."""

from __future__ import annotations

import torch


def sft_loss(logprob: torch.Tensor, loss_weight: torch.Tensor) -> torch.Tensor:
    """``- sum_t w_t log p_t`` over a micro-batch, to be divided by the step's number of supervised tokens.

    The loss is linear in the log-probabilities, so a shared token takes the sum of its samples' masks as its weight and
    no sample has to be restored. The denominator counts the logical tokens of the whole step, over all micro-batches
    and data-parallel ranks, that have a predictor and a non-zero mask; Megatron-Core divides by it when
    ``calculate_per_token_loss`` is set.

    Args:
        logprob: ``[P]``, at each token's own flat index.
        loss_weight: ``[P]``, ``FlatLayout.loss_weight``.

    Returns:
        Scalar, the sum.
    """
    return -torch.dot(logprob, loss_weight.to(logprob.dtype))
