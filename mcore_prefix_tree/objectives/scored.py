"""The scored tokens of a step's samples as columns, for computations on the host before a step runs.

Legend: S samples of the step, K scored tokens of all of them, sample after sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

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
    """Every token with a predictor and a loss mask that is not zero.

    Attributes:
        samples: samples of the entire step, all micro-batches and ranks.
        position: int64 ``[K]``, index of each token in its own sample.
        sample: int64 ``[K]``, sample that each token belongs to.
        cu_lens: int64 ``[S + 1]``, sample s has the entries ``cu_lens[s]:cu_lens[s + 1]``.
        mask: float64 ``[K]``, loss mask of each token.
    """

    samples: Sequence[Sample]
    position: Int64Array
    sample: Int64Array
    cu_lens: Int64Array
    mask: Float64Array

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
