"""The scored tokens of a step's samples as columns, for computations on the host before a step runs; and their weights.

A step's loss is ``sum over scored tokens of weight * loss / divisor``. The weights are set on the host from all samples
of the step, and the divisor is an integer that every sample adds its part to. So a micro-batch returns the sum of its
own tokens and of its own samples' parts, however the step is cut; Megatron-Core adds both up over micro-batches and
data-parallel ranks and divides once, as it does by the number of tokens (``calculate_per_token_loss=True``).

The loss mask multiplies a token's loss; it does not change the divisor, which counts tokens with a mask that is not 0.

Legend: S samples of the step, K scored tokens of all of them, sample after sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import SampleError

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class MissingSignalError(SampleError):
    """A sample lacks ``field`` of ``Signals``, which its objective reads; the message names both and the sample."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def refuse_sampling_masks(samples: Sequence[Sample], setting: str) -> None:
    """Raise SampleError for a sample with a sampling mask, for a loss that compares whole vocabularies."""
    masked = next((sample for sample in samples if sample.signals.sampling_mask is not None), None)
    if masked is not None:
        raise SampleError(
            f"{masked.source}: field 'sampling_mask' limits predictions to the ids that an engine kept, but {setting} "
            "compares them over the whole vocabulary; remove the field"
        )


def refuse_routes(samples: Sequence[Sample], setting: str) -> None:
    """Raise SampleError for a sample with routes, for a scalar head, which reads the last token, which has none."""
    routed = next((sample for sample in samples if sample.signals.routes is not None), None)
    if routed is not None:
        raise SampleError(
            f"{routed.source}: field 'routed_experts' names the experts of the policy that wrote the sample, but "
            f"{setting} is another model; remove the field"
        )


def rollout_keys(samples: Sequence[Sample]) -> list[Hashable]:
    """Return keys that are equal for the samples of one rollout. A sample that names none is a rollout by itself."""
    keys = (sample.signals.unit("rollout") for sample in samples)
    return [index if key is None else key for index, key in enumerate(keys)]


def numbered(keys: Sequence[Hashable]) -> Int64Array:
    """Return int64 ``[n]``, equal numbers for equal keys, from 0 in the order in which keys first appear."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens:
    """Every token with a predictor and a loss mask that is not zero."""

    samples: Sequence[Sample]  # samples of the entire step, all micro-batches and ranks
    position: Int64Array  # int64 [K], index of each token in its own sample
    sample: Int64Array  # int64 [K], sample that each token belongs to
    cu_lens: Int64Array  # int64 [S + 1], sample s has the entries cu_lens[s]:cu_lens[s + 1]
    mask: Float64Array  # float64 [K], loss mask of each token

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> ScoredTokens:
        # Nothing predicts the first token.
        positions = [np.flatnonzero(sample.loss_mask[1:]) + 1 for sample in samples]
        masks = [sample.loss_mask[own] for sample, own in zip(samples, positions, strict=True)]
        lens = np.fromiter(map(len, positions), dtype=np.int64, count=len(samples))
        return cls(
            samples=samples,
            position=np.concatenate(positions) if samples else np.empty(0, dtype=np.int64),
            sample=np.repeat(np.arange(len(samples)), lens),
            cu_lens=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lens)]),
            mask=np.concatenate(masks).astype(np.float64) if samples else np.empty(0),
        )

    def __len__(self) -> int:
        return len(self.position)

    @property
    def lens(self) -> Int64Array:
        """Return int64 ``[S]``, scored tokens of each sample."""
        return np.diff(self.cu_lens)

    @cached_property
    def turn(self) -> Int64Array:
        """Return int64 ``[K]``, the turn (unbroken run of scored tokens) of its sample that a token belongs to."""
        # Whether a run continues from one sample into the next makes no difference to its number within either.
        run = np.cumsum(np.diff(self.position, prepend=0) != 1)
        has_tokens = np.flatnonzero(self.lens)
        first_run = np.zeros(len(self.samples), dtype=np.int64)
        first_run[has_tokens] = run[self.cu_lens[has_tokens]]
        turn: Int64Array = run - first_run[self.sample]
        return turn

    def sequence(self, by: Literal["rollout", "turn"]) -> Int64Array:
        """Return int64 ``[K]``, the rollout, or the turn, that each token belongs to, numbered over the step.

        A sample that names its ``turn`` is one.
        """
        if by == "rollout":
            return numbered(rollout_keys(self.samples))[self.sample]
        is_turn = np.array([sample.signals.turn is not None for sample in self.samples], dtype=np.bool_)
        turn = np.where(is_turn[self.sample], 0, self.turn)
        is_next = (np.diff(self.sample, prepend=-1) != 0) | (np.diff(turn, prepend=0) != 0)
        number: Int64Array = np.cumsum(is_next) - 1
        return number

    def column(self, name: str, setting: str) -> npt.NDArray[Any]:
        """Return ``[K]``: a field of ``Signals`` with one number per token, or one for all tokens of the sample.

        Raises MissingSignalError, which names ``setting``, if a sample with scored tokens lacks it.
        """
        parts = []
        for index in np.flatnonzero(self.lens).tolist():
            value = self.required(index, name, setting)
            entries = slice(self.cu_lens[index], self.cu_lens[index + 1])
            positions = self.position[entries]
            parts.append(np.full(len(positions), value) if np.ndim(value) == 0 else value[positions])
        return np.concatenate(parts) if parts else np.empty(0)

    def required(self, index: int, name: str, setting: str) -> Any:
        """Return a field of a sample's signals; raises as :meth:`column`."""
        sample = self.samples[index]
        value = getattr(sample.signals, name)
        if value is None:
            raise MissingSignalError(f"{sample.source}: field '{name}' is missing, and {setting} needs it", name)
        return value


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
            separate rollout. ``group``: each group's mean over its tokens, averaged over groups. ``sample_sum``: the
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
