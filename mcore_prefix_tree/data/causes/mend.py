"""Causes of the mismatches of samples, each with the fold ratio that mending it would give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_prefix_tree.data.causes.find import Mismatch, find_mismatches
from mcore_prefix_tree.data.causes.words import CauseName, Decode, Difference, Tokens
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, sort_samples

_CAUSES = 5
# A cause is named if mending it saves this part of the physical tokens.
_LEAST = 0.005


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause, over all samples that have it.

    Attributes:
        detail: kind of the words of a prompt, or ``tools``; empty for other causes.
        samples: number of samples that diverge from another because of it.
        physical_tokens, fold_ratio: those of all samples once it is fixed.
        is_bound: whether some samples are not seen to meet again, so that the ratio is an upper bound.
        example: first of these differences, after ``at`` common tokens of the samples at ``source`` and ``other``.
    """

    name: CauseName
    detail: str
    samples: int
    physical_tokens: int
    fold_ratio: float
    is_bound: bool
    example: Difference
    source: str
    other: str
    at: int


@dataclass(frozen=True, kw_only=True)
class Causes:
    """Causes, the costliest first; ratios are lower bounds of the gain unless all branches were examined."""

    causes: list[Cause]
    branches: bool
    is_complete: bool


def find_causes(samples: Sequence[Sample], *, decode: Decode | None = None, sharing: Sharing = SHARE_ALL) -> Causes:
    """Find why samples share less than they should; intended branches, for example several answers, have no cause.

    Words stay unknown if ``decode`` is None (no tokenizer) or returns None for tokens (another vocabulary).
    """
    mismatches, is_complete = find_mismatches(samples, decode)
    order, shared = sort_samples(samples, sharing)
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    branches = bool((shared[1:] < lengths[order][:-1]).any())
    physical = int(lengths.sum() - shared.sum())
    kinds: dict[tuple[CauseName, str], list[tuple[Mismatch, Difference]]] = defaultdict(list)
    for mismatch in mismatches:
        for number, difference in enumerate(mismatch.differences):
            own = kinds[difference.cause, difference.detail]
            if number >= mismatch.inherited:
                own.append((mismatch, difference))
    found = []
    for (name, detail), own in kinds.items():
        if not own:
            continue
        mended_physical, mended_logical = _folded(mended(samples, mismatches, name, detail), sharing)
        if physical - mended_physical < max(1, _LEAST * physical):
            continue
        is_bound = any(difference.is_bound for _, difference in own)
        logical = max(mended_logical, int(lengths.sum())) if is_bound else mended_logical
        mismatch, example = own[0]
        found.append(
            Cause(
                name=name,
                detail=detail,
                samples=len({mismatch.sample for mismatch, _ in own}),
                physical_tokens=mended_physical,
                fold_ratio=logical / mended_physical,
                is_bound=is_bound,
                example=example,
                source=samples[mismatch.sample].source,
                other=samples[mismatch.other].source,
                at=example.start,
            )
        )
    found.sort(key=lambda cause: cause.physical_tokens)
    return Causes(causes=found[:_CAUSES], branches=branches, is_complete=is_complete)


def _folded(samples: Sequence[Sample], sharing: Sharing) -> tuple[int, int]:
    """Return the physical and the logical tokens of samples."""
    _, shared = sort_samples(samples, sharing)
    logical = sum(map(len, samples))
    return logical - int(shared.sum()), logical


def mended(samples: Sequence[Sample], mismatches: Sequence[Mismatch], name: CauseName, detail: str) -> list[Sample]:
    """Return the samples with the differences of one cause replaced."""
    edits: dict[int, list[Difference]] = defaultdict(list)
    for mismatch in mismatches:
        edits[mismatch.sample] += [one for one in mismatch.differences if (one.cause, one.detail) == (name, detail)]
    result = list(samples)
    for index, differences in edits.items():
        if differences:
            result[index] = _with(samples[index], differences)
    return result


def _with(sample: Sample, differences: Sequence[Difference]) -> Sample:
    tokens: list[Tokens] = []
    mask = []
    at = 0
    for one in sorted(differences, key=lambda difference: difference.start):
        if one.start < at:
            continue
        tokens += [sample.tokens[at : one.start], one.tokens]
        mask += [sample.loss_mask[at : one.start], np.zeros(len(one.tokens), dtype=np.float32)]
        at = one.end
    return Sample(
        tokens=np.concatenate([*tokens, sample.tokens[at:]]),
        loss_mask=np.concatenate([*mask, sample.loss_mask[at:]]),
        merge_key=sample.merge_key,
        source=sample.source,
    )
