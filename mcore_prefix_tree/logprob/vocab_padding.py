"""Columns of logits that pad the vocabulary to the tensor-parallel ranks: they have no probability or gradient."""

from __future__ import annotations

import torch

# Its exponential is 0 next to any logit. It is finite, because a product of a probability of 0 and -inf is NaN.
_NEVER = -1e30


def mask_padding_(logits: torch.Tensor, vocab_size: int | None, vocab_start: int = 0) -> torch.Tensor:
    """Give the columns of padding of ``[..., Vl]`` no probability, in place, and return the tensor.

    Columns from id ``vocab_size`` on are padding, None means no padding; ``vocab_start`` is the id of the first column.
    """
    if vocab_size is not None and vocab_size < vocab_start + logits.shape[-1]:
        lowest = torch.finfo(logits.dtype).min / 2
        logits[..., max(0, vocab_size - vocab_start) :] = max(_NEVER, lowest)
    return logits
