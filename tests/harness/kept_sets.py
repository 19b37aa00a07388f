"""Sampling masks of samples, and logits outside of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mcore_prefix_tree import Sample, SamplingMask


def within_sets(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Logits ``[n, V]`` of a sample with -inf outside the sets that its tokens were drawn from."""
    mask = sample.signals.sampling_mask
    if mask is None:
        return logits
    drops = torch.zeros_like(logits, dtype=torch.bool)
    for t in range(1, len(sample)):
        ids = mask.token_ids[mask.offsets[t] : mask.offsets[t + 1]].tolist()
        if ids:
            drops[t - 1] = True
            drops[t - 1, ids] = False
    return logits.masked_fill(drops, -math.inf)


def with_sets(samples: Sequence[Sample], vocab: int) -> list[Sample]:
    """The samples with sets of one id, of some, of all or none at every token; the same in any order of samples."""
    made = []
    for sample in samples:
        old = sample.signals.old_logprobs
        seed = zlib.crc32(sample.tokens.tobytes() + (b"" if old is None else np.asarray(old).tobytes()))
        rng = np.random.default_rng(seed)
        rows: list[list[int] | None] = []
        for token, kind in zip(sample.tokens.tolist(), rng.integers(0, 5, size=len(sample)).tolist(), strict=True):
            others = rng.choice(vocab, size=(0, 0, 2, 9, vocab)[kind], replace=False).tolist()
            rows.append(None if kind == 0 else sorted({token, *others}))
        mask = SamplingMask.from_rows(rows)
        made.append(replace(sample, signals=replace(sample.signals, sampling_mask=mask)))
    return made
