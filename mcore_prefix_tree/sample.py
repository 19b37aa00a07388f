"""A sample: one token sequence, its scored tokens, and the key that must be equal to share with another sample."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.signals import SampleError, Signals, check_signals

INT32_MAX = np.iinfo(np.int32).max
# Logits of some hundreds divided by less exceed the resolution of single precision, and then its range.
MIN_TEMPERATURE = 1e-3

__all__ = ["INT32_MAX", "MIN_TEMPERATURE", "Sample", "SampleError", "Signals", "Tempered"]


@dataclass(frozen=True, kw_only=True)
class Tempered:
    """A merge key that holds the temperature at which samples were drawn: their logits are divided by it.

    Attributes:
        temperature: finite number, at least ``MIN_TEMPERATURE``.
        key: further value that has to be equal for two samples to share.
    """

    temperature: float
    key: Hashable = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One training sequence.

    The fields of :class:`~mcore_prefix_tree.signals.Signals` are keywords of the constructor, for example
    ``Sample(tokens, loss_mask=mask, advantage=0.5, old_logprobs=logprobs)``. They become ``signals``.

    Two samples share the leading tokens that are equal in both, if their ``merge_key`` is equal too. Everything else
    here is per sample and may differ between samples that share tokens.

    Attributes:
        tokens: int32 ``[n]``, n >= 1, token ids >= 0.
        loss_mask: float32 ``[n]``, finite and >= 0. ``loss_mask[t]`` weighs the loss of predicting ``tokens[t]`` from
            ``tokens[:t]``; 0 leaves it unscored. ``loss_mask[0]`` has no effect: nothing predicts the first token.
        merge_key: value that has to be equal, like the tokens, for two samples to share (for example an adapter or a
            policy version); its ``repr`` is the same in every process. A :class:`Tempered` one also sets the
            temperature.
        source: place where the sample came from (``file:line``, ``file:line turn 3``), for messages.
        part: end of ``source`` that names a part of a record (``turn 3``, ``rejected``); empty for an entire record.
        signals: signals that objectives other than supervised training read, for example rewards, log-probabilities or
            preferences. Give either this or its fields.
        renderings: the same conversation in the tokens of other models, each in its own chat format; empty unless
            readers were asked for it.
        carried: fields of its record that nothing here reads, as the file has them, for a writer; empty unless readers
            were asked for them.

    Raises:
        SampleError: a field is malformed, or ``signals`` and a field of it are both given, on construction; names
            ``source`` and the field.
        TypeError: a keyword is neither a parameter nor a field of ``Signals``.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    merge_key: Hashable = None
    source: str = "sample"
    part: str = ""
    signals: Signals = field(default_factory=Signals)
    renderings: tuple[Sample, ...] = ()
    carried: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        loss_mask: Sequence[float] | npt.NDArray[np.floating | np.integer | np.bool_] | None = None,
        merge_key: Hashable = None,
        source: str = "sample",
        part: str = "",
        signals: Signals | None = None,
        renderings: tuple[Sample, ...] = (),
        carried: Mapping[str, Any] | None = None,
        **signal_fields: Any,
    ) -> None:
        """Take tokens ``[n]`` and a loss mask ``[n]``; ``loss_mask=None`` scores every token that has a predictor."""
        checked_tokens = _token_array(tokens, source)
        if loss_mask is None:
            checked_mask = np.ones(len(checked_tokens), dtype=np.float32)
        else:
            checked_mask = _mask_array(loss_mask, len(checked_tokens), source)
        checked_tokens.flags.writeable = False
        checked_mask.flags.writeable = False
        object.__setattr__(self, "tokens", checked_tokens)
        object.__setattr__(self, "loss_mask", checked_mask)
        try:
            hash(merge_key)
        except TypeError:
            raise SampleError(
                f"{source}: the merge_key {str(merge_key)[:40]} cannot be hashed; give a string, a number or a tuple"
            ) from None
        object.__setattr__(self, "merge_key", merge_key)
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise SampleError(
                f"{source}: the temperature of its merge_key is {self.temperature}; it must be at least "
                f"{MIN_TEMPERATURE}, and finite"
            )
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "part", part)
        if not isinstance(signals, Signals | None):
            raise SampleError(f"{source}: signals is a {type(signals).__name__}; give Signals(reward=...)")
        if signal_fields:
            signals = _signals_from(signal_fields, signals, source)
        checked_signals = (
            NO_SIGNALS if signals is None else check_signals(signals, checked_tokens, checked_mask, source)
        )
        object.__setattr__(self, "signals", checked_signals)
        object.__setattr__(self, "renderings", renderings)
        object.__setattr__(self, "carried", carried or _NOTHING)

    def __len__(self) -> int:
        return len(self.tokens)

    def carrying(self, carried: Mapping[str, Any]) -> Sample:
        """Return the same sample with other fields to carry."""
        other = copy(self)
        object.__setattr__(other, "carried", carried)
        return other

    @property
    def is_scored(self) -> bool:
        """Return whether any of its tokens is scored."""
        return bool(self.loss_mask[1:].any())

    @property
    def temperature(self) -> float:
        """Return the divisor of the logits of its predictions."""
        return self.merge_key.temperature if isinstance(self.merge_key, Tempered) else 1.0


def check_samples(samples: object) -> None:
    """Raise TypeError, with the way out, for anything but a sequence of samples."""
    if not (hasattr(samples, "__len__") and hasattr(samples, "__iter__")):
        raise TypeError(f"samples is a {type(samples).__name__}; give a list of Sample")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise TypeError(
                f"samples[{index}] is a {type(sample).__name__}, not a Sample; give Sample(tokens=[...]) for each"
            )


NO_SIGNALS = Signals()
_SIGNAL_NAMES = tuple(each.name for each in fields(Signals))
_NOTHING: Mapping[str, Any] = {}  # one for all samples


def _signals_from(signal_fields: Mapping[str, Any], signals: Signals | None, source: str) -> Signals:
    unknown = next((name for name in signal_fields if name not in _SIGNAL_NAMES), None)
    if unknown is not None:
        raise TypeError(f"Sample has no field {unknown!r}; those of its signals are {', '.join(_SIGNAL_NAMES)}")
    if signals is not None:
        name = next(iter(signal_fields))
        raise SampleError(f"{source}: 'signals' and field '{name}' are both given; set '{name}' in 'signals'")
    return Signals(**signal_fields)


def _token_array(tokens: object, source: str) -> npt.NDArray[np.int32]:
    try:
        array = np.asarray(tokens)
    except ValueError:  # a ragged list
        raise SampleError(f"{source}: field 'tokens' must be a flat list of integers") from None
    except (RuntimeError, TypeError) as error:  # a tensor that has no array: sparse, on a GPU, with a gradient
        raise SampleError(f"{source}: field 'tokens' must be a flat list of integers ({error})") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SampleError(f"{source}: field 'tokens' must be a flat list of integers")
    if array.size == 0:
        raise SampleError(f"{source}: field 'tokens' is empty; a sample needs at least one token")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > INT32_MAX:
        at = int(np.argmax((array < 0) | (array > INT32_MAX)))
        raise SampleError(f"{source}: field 'tokens' has {array[at]} at index {at}; token ids are 0 to {INT32_MAX}")
    return array.astype(np.int32)


def _mask_array(mask: object, length: int, source: str) -> npt.NDArray[np.float32]:
    try:
        array = np.asarray(mask)
    except ValueError:
        raise SampleError(f"{source}: field 'loss_mask' must be a flat list of numbers") from None
    except (RuntimeError, TypeError) as error:
        raise SampleError(f"{source}: field 'loss_mask' must be a flat list of numbers ({error})") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iufb"):
        raise SampleError(f"{source}: field 'loss_mask' must be a flat list of numbers")
    if len(array) != length:
        raise SampleError(
            f"{source}: field 'loss_mask' has {len(array)} entries but 'tokens' has {length}; they must match"
        )
    with np.errstate(over="ignore"):  # becomes inf, which is refused by name below
        weights = array.astype(np.float32)
    bad = ~np.isfinite(weights) | (weights < 0)
    if bad.any():
        at = int(np.argmax(bad))
        raise SampleError(f"{source}: field 'loss_mask' has {array[at]} at index {at}; weights are finite and >= 0")
    if np.count_nonzero(weights) != np.count_nonzero(array):
        at = int(np.argmax((weights == 0) & (array != 0)))
        raise SampleError(
            f"{source}: field 'loss_mask' has {array[at]} at index {at}, which single precision rounds to 0; give 0, "
            "or a larger weight"
        )
    return weights
