"""Signals of a sample in addition to its tokens: rewards, log-probabilities, preferences, a teacher.

A field per token has one entry for each of the sample's n tokens, and entry t belongs to the *prediction* of
``tokens[t]``, as in ``loss_mask``. Only the entries of scored tokens (``loss_mask[t] != 0``, t >= 1) are read; the
others may be NaN. A turn is an unbroken run of scored tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.signals.routed_experts import (
    RoutedExperts,
    SampleError,
    check_routed_experts,
    fill_absent,
    find_absent,
    freeze,
    to_integers,
)

FloatArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Numbers = Sequence[float] | npt.NDArray[np.floating]

# Units that a step never divides: the samples of one pair, rollout or group. A group holds complete rollouts.
GroupedBy = Literal["pair", "rollout", "group"]

PER_TOKEN = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns")
# A teacher's top entries may add up to a little more than 1 after rounding.
_MASS_TOLERANCE = 1e-3
# Largest rounding error of an engine, which puts a log-probability above 0.
_LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A teacher's distribution at every token of a sample: its k likeliest tokens.

    A teacher with the student's tokenizer has a row for each of the sample's tokens. One with another tokenizer reads
    the same text in m tokens of its tokenizer, has a row for each of these, and sets the last three attributes; n is m.

    Attributes:
        token_ids: int32 ``[n, k]``, different ids of the teacher's vocabulary in each row. A list may have None for a
            row that is not read, here and in ``logprobs``; with nothing but None, k is 0.
        logprobs: float32 ``[n, k]`` in nats, or float64 with ``tokens``; row t belongs to the distribution that
            ``tokens[t]`` is predicted from. The rest of the vocabulary has the remaining probability of a row.
        tokens: int32 ``[m]``, the teacher's token ids; None if these are the sample's.
        realised: float32 or float64 ``[m]``, the log-probability of each of ``tokens``; NaN for a missing row.
        tokenizer: SHA-256 of the teacher's tokenizer (``TokenBytes.hash``).
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: FloatArray
    tokens: npt.NDArray[np.int32] | None = None
    realised: FloatArray | None = None
    tokenizer: str | None = None

    def arrays(self) -> dict[str, Any]:
        """Return the set fields, by name, for a file, in the precision of the input."""
        found = {name: part for name, part in vars(self).items() if part is not None}
        if self.tokens is None:
            found["logprobs"] = self.logprobs.astype(np.float32)
        return found

    def parts(self) -> dict[str, Any]:
        """Return :meth:`arrays`, with None in place of each row that has no finite number, which nothing reads."""
        found = self.arrays()
        is_read: list[bool] = [bool(np.isfinite(row).any()) for row in self.logprobs]
        if not all(is_read):
            for name in ("token_ids", "logprobs"):
                found[name] = [row if one else None for row, one in zip(found[name], is_read, strict=True)]
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingMask:
    """The ids that each token of a sample could have been drawn from, after an engine's top-k, top-p or min-p.

    Log-probabilities and entropies of the sample's predictions are those of the distribution over these ids alone.

    Attributes:
        token_ids: int32 ``[K]``, the kept ids of one token after the other, each id once for a token; a sample sorts
            them within each token.
        offsets: int64 ``[n + 1]``: ``tokens[t]`` was drawn from ``token_ids[offsets[t]:offsets[t + 1]]``, or from the
            whole vocabulary if these are none.
    """

    token_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | npt.NDArray[np.integer] | None]) -> SamplingMask:
        """Return the mask of a list of ids for each token; None or an empty list is the whole vocabulary."""
        sets = [np.asarray(() if row is None else row) for row in rows]
        ids = [one for one in sets if one.size] or [np.empty(0, dtype=np.int32)]
        return cls(token_ids=np.concatenate(ids), offsets=np.cumsum([0, *(one.size for one in sets)], dtype=np.int64))

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of kept ids of each token, int64 ``[n]``; 0 for the whole vocabulary."""
        return np.diff(self.offsets)

    def arrays(self) -> dict[str, Any]:
        """Return the fields, by name, for a file."""
        return {"token_ids": self.token_ids, "offsets": self.offsets}

    parts = arrays


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Signals:
    """Optional training signals of one sample; :class:`~mcore_prefix_tree.sample.Sample` checks them.

    Attributes:
        reward: one number, or one for every turn of the rollout.
        group: id of the prompt; rollouts of one group are compared with each other.
        rollout: id of the rollout within its group, if several samples (its turns) are parts of one; they carry the
            same ``reward`` and it counts once.
        turn: index of the sample's turn in its rollout, from 0.
        advantage: one number, or float64 ``[n]``.
        old_logprobs: ``[n]`` in nats, under the policy that the ratio is taken against.
        ref_logprobs: ``[n]``, under the reference policy.
        rollout_logprobs: ``[n]``, as the engine that sampled the tokens reported them.
        values: ``[n]``, the critic's estimate of the state that ``tokens[t]`` is chosen in.
        returns: ``[n]``, the critic's target there.
        pair: id of a preference pair; one sample of it is chosen and one is not.
        chosen: whether this sample is the chosen one of the two.
        label: whether the completion is desirable (KTO).
        mismatched: whether the completion belongs to another prompt; it then only measures the divergence from the
            reference (KTO).
        teacher: teacher to distil from.
        sampling_mask: ids that each token was drawn from; None is the whole vocabulary.
        routed_experts: experts that each token was sent to, integers ``[n, layers, top-k]`` or ``[n - 1, layers,
            top-k]``, -1 in all entries of a token without a route; kept as :class:`RoutedExperts`. Layers are all of
            the model's, or those with experts. None routes as the model does.
    """

    reward: float | Numbers | None = None
    group: Hashable = None
    rollout: Hashable = None
    turn: int | None = None
    advantage: float | Numbers | None = None
    old_logprobs: Numbers | None = None
    ref_logprobs: Numbers | None = None
    rollout_logprobs: Numbers | None = None
    values: Numbers | None = None
    returns: Numbers | None = None
    pair: Hashable = None
    chosen: bool | None = None
    label: bool | None = None
    mismatched: bool = False
    teacher: Teacher | None = None
    sampling_mask: SamplingMask | None = None
    routed_experts: Sequence[Any] | npt.NDArray[np.integer] | RoutedExperts | None = None

    @property
    def routes(self) -> RoutedExperts | None:
        """Return the checked routes of a sample, or None."""
        assert self.routed_experts is None or isinstance(self.routed_experts, RoutedExperts), "a sample made it"
        return self.routed_experts

    def unit(self, by: GroupedBy) -> Hashable:
        """Return the key that all samples of one pair, rollout or group share; None for a sample that names none.

        A rollout's id is unique only within its group, so both ids identify a rollout.
        """
        if by == "rollout":
            return None if self.rollout is None else (self.group, self.rollout)
        key: Hashable = getattr(self, by)
        return key

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) is not f.default]
        return f"Signals({', '.join(given)})"


def check_signals(
    signals: Signals, tokens: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.float32], source: str
) -> Signals:
    """Return a sample's signals, checked, with read-only arrays, for ``tokens`` and ``loss_mask``, ``[n]`` each.

    Fields per token are float32, or float64 if they were given as such; ``reward`` and ``advantage`` are a float or
    float64. Raises SampleError for a malformed field, with ``source`` and the field.
    """
    scored = loss_mask != 0
    scored[:1] = False
    checked: dict[str, Any] = {}
    if signals.reward is not None:
        checked["reward"] = _reward(signals, scored, source)
    if signals.advantage is not None:
        advantage = _numbers(signals.advantage, "advantage", source)
        _check_per_token(advantage, "advantage", scored, source, scalar_too=True)
        checked["advantage"] = float(advantage) if advantage.ndim == 0 else freeze(advantage.astype(np.float64))
    for name in PER_TOKEN:
        value = getattr(signals, name)
        if value is not None:
            array = _numbers(value, name, source)
            _check_per_token(array, name, scored, source)
            if name.endswith("logprobs"):
                _check_not_probabilities(array, name, scored, source)
            is_double = isinstance(value, np.ndarray) and value.dtype == np.float64
            checked[name] = freeze(array.astype(np.float64 if is_double else np.float32))
    if signals.teacher is not None:
        checked["teacher"] = _teacher(signals.teacher, scored, source)
    if signals.sampling_mask is not None:
        checked["sampling_mask"] = _sampling_mask(signals.sampling_mask, tokens, source)
    if signals.routed_experts is not None:
        checked["routed_experts"] = check_routed_experts(signals.routed_experts, len(tokens), source)
    _check_roles(signals, source)
    return replace(signals, **checked)


def _check_roles(signals: Signals, source: str) -> None:
    if (signals.pair is None) != (signals.chosen is None):
        present, missing = ("pair", "chosen") if signals.chosen is None else ("chosen", "pair")
        raise SampleError(f"{source}: field '{present}' needs field '{missing}'; give both or neither")
    for name in ("group", "rollout", "pair"):
        if not isinstance(getattr(signals, name), Hashable):
            raise SampleError(f"{source}: field '{name}' must be hashable, such as a string or a number")
    for name in ("chosen", "label", "mismatched"):
        value = getattr(signals, name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise SampleError(f"{source}: field '{name}' must be true or false, not {value!r}")
    check_turn(signals.turn, source)


def check_turn(turn: object, source: str) -> None:
    """Raise SampleError unless a turn is an integer from 0 that fits into 32 bits, or None."""
    if turn is not None and (not isinstance(turn, int) or isinstance(turn, bool) or not 0 <= turn < 1 << 31):
        raise SampleError(f"{source}: field 'turn' must be an integer from 0 to {(1 << 31) - 1}, not {turn!r:.40}")


def _reward(signals: Signals, scored: npt.NDArray[np.bool_], source: str) -> float | npt.NDArray[np.float64]:
    """Return a checked reward: a float, or float64 ``[turns]`` for the turns in ``scored``, ``[n]``."""
    reward = _numbers(signals.reward, "reward", source)
    if not np.isfinite(reward).all() or reward.ndim > 1:
        raise SampleError(f"{source}: field 'reward' must be a finite number, or a list of one for every turn")
    if reward.ndim == 0:
        return float(reward)
    if signals.turn is None:
        turns = int(np.count_nonzero(np.diff(scored, prepend=False) & scored))
        if len(reward) != turns:
            raise SampleError(
                f"{source}: field 'reward' has {len(reward)} entries, but 'loss_mask' scores {turns} turns (unbroken "
                "runs of tokens); give one reward for every turn, or a single number"
            )
    elif signals.turn >= len(reward):
        raise SampleError(
            f"{source}: field 'reward' has {len(reward)} entries, but this is turn {signals.turn}, counted from 0; "
            "give one reward for every turn of the rollout"
        )
    return freeze(reward.astype(np.float64))


def _teacher(teacher: Teacher, scored: npt.NDArray[np.bool_], source: str) -> Teacher:
    """Return a checked teacher, its arrays ``[n, k]``, for ``scored``, bool ``[n]``."""
    double = teacher.tokens is not None
    absent = find_absent(teacher.token_ids) | find_absent(teacher.logprobs)
    logprobs = fill_absent(teacher.logprobs, absent, np.nan)
    logprobs = _log_probabilities(logprobs, "teacher.logprobs", source, double=double)
    token_ids = to_integers(fill_absent(teacher.token_ids, absent, 0))
    own: dict[str, Any] = {}
    of = "tokens"
    if teacher.tokens is not None:
        own, of = _own_tokens(teacher, source), "teacher.tokens"
        scored = np.isfinite(own["realised"])
    length = len(scored)
    if token_ids.ndim != 2 or token_ids.dtype.kind not in "iu" or token_ids.shape != logprobs.shape:
        raise SampleError(
            f"{source}: fields 'teacher.token_ids' and 'teacher.logprobs' must both be {length} lists of k"
        )
    if len(token_ids) != length or not (token_ids.shape[1] or len(absent) == length):
        raise SampleError(
            f"{source}: field 'teacher' has {len(token_ids)} rows of {token_ids.shape[1]} but '{of}' has {length} "
            "entries; there must be a row of at least one token for each"
        )
    too_large = token_ids > np.iinfo(np.int32).max
    ordered = np.sort(token_ids, axis=1)
    are_wrong = (np.diff(ordered, axis=1) == 0).any(axis=1) | (ordered < 0).any(axis=1)
    with np.errstate(over="ignore"):  # infinite is more than 1 too
        mass = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    faults = {
        "no row": np.isin(np.arange(length), [*absent]),
        "token ids that are not different and >= 0": are_wrong,
        "token ids that no vocabulary has": too_large.any(axis=1),
        "log-probabilities that are not finite": ~np.isfinite(logprobs).all(axis=1),
        "more probability than 1": mass > 1 + _MASS_TOLERANCE,
    }
    for fault, rows in faults.items():
        if (rows & scored).any():
            raise SampleError(f"{source}: field 'teacher' has {fault} at token {int(np.argmax(rows & scored))}")
    return Teacher(token_ids=freeze(token_ids.astype(np.int32)), logprobs=freeze(logprobs), **own)


def _sampling_mask(mask: object, tokens: npt.NDArray[np.int32], source: str) -> SamplingMask:
    """Return a checked mask, ascending within each token, for ``tokens``, int32 ``[n]``."""
    field, length = f"{source}: field 'sampling_mask", len(tokens)
    if not isinstance(mask, SamplingMask):
        raise SampleError(f"{field}' is a {type(mask).__name__}; give SamplingMask(token_ids=..., offsets=...)")
    ids, offsets = to_integers(mask.token_ids), to_integers(mask.offsets)
    for name, array in (("token_ids", ids), ("offsets", offsets)):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise SampleError(f"{field}.{name}' must be a flat list of integers")
    offsets = offsets.astype(np.int64)
    if len(offsets) != length + 1:
        raise SampleError(
            f"{field}' has sets for {max(len(offsets) - 1, 0)} tokens but 'tokens' has {length}; there must be one for "
            "each, empty where the whole vocabulary was kept"
        )
    sizes = np.diff(offsets)
    if offsets[0] != 0 or (sizes < 0).any() or offsets[-1] != len(ids):
        raise SampleError(f"{field}.offsets' must rise from 0 to {len(ids)}, the number of 'sampling_mask.token_ids'")
    token, largest = np.repeat(np.arange(length), sizes), np.iinfo(np.int32).max
    bad = (ids < 0) | (ids > largest)
    if bad.any():
        at = int(np.argmax(bad))
        raise SampleError(f"{field}' keeps {ids[at]} at index {token[at]}; token ids are 0 to {largest}")
    keyed = np.sort(token << 32 | ids.astype(np.int64))
    ids = (keyed & 0xFFFFFFFF).astype(np.int32)
    twice = np.flatnonzero(np.diff(keyed) == 0)
    if len(twice):
        raise SampleError(f"{field}' keeps {ids[twice[0]]} twice at index {token[twice[0]]}; give each id once")
    outside = (sizes > 0) & ~np.isin(np.arange(length) << 32 | tokens.astype(np.int64), keyed)
    outside[:1] = False  # nothing predicts the first token
    if outside.any():
        at = int(np.argmax(outside))
        raise SampleError(
            f"{field}' does not keep {tokens[at]}, the token at index {at}; give each token the ids that it was drawn "
            "from"
        )
    return SamplingMask(token_ids=freeze(ids), offsets=freeze(offsets))


def _own_tokens(teacher: Teacher, source: str) -> dict[str, Any]:
    """Return the fields, in addition to rows, of a teacher with another tokenizer."""
    tokens, realised = (
        to_integers(teacher.tokens),
        _log_probabilities(teacher.realised, "teacher.realised", source, double=True),
    )
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise SampleError(f"{source}: field 'teacher.tokens' must be a list of token ids, at least one")
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        raise SampleError(f"{source}: field 'teacher.tokens' has token ids that no vocabulary has")
    if realised.shape != tokens.shape:
        raise SampleError(f"{source}: field 'teacher.realised' must have a number for each of 'teacher.tokens'")
    if not isinstance(teacher.tokenizer, str):
        raise SampleError(f"{source}: field 'teacher.tokenizer' must be the hash of the tokenizer of 'teacher.tokens'")
    _check_not_probabilities(realised, "teacher.realised", np.isfinite(realised), source)
    return {"tokens": freeze(tokens.astype(np.int32)), "realised": freeze(realised), "tokenizer": teacher.tokenizer}


def _log_probabilities(value: object, name: str, source: str, *, double: bool) -> FloatArray:
    """Return float32, or with ``double`` float64 of an array of float64."""
    is_double = double and isinstance(value, np.ndarray) and value.dtype == np.float64
    with np.errstate(over="ignore"):  # becomes inf, which is rejected when it is read
        return _numbers(value, name, source).astype(np.float64 if is_double else np.float32)


def _numbers(value: object, name: str, source: str) -> npt.NDArray[Any]:
    """An array of numbers; None in a list is NaN."""
    kinds: set[type] = set()
    try:
        array = np.asarray(value)
        # NumPy converts booleans among numbers to numbers, and text next to a null too.
        if isinstance(value, list) and array.ndim == 1:
            kinds = set(map(type, value))
        elif array.dtype == object:
            kinds = set(map(type, array.flat))
        if array.dtype == object and not any(issubclass(kind, (str, bytes)) for kind in kinds):
            array = array.astype(np.float64)
    except (ValueError, TypeError, OverflowError):  # the last: an integer of hundreds of digits
        array = np.empty(0, dtype=np.str_)
    if array.dtype == np.bool_ or kinds & {bool, np.bool_}:
        raise SampleError(f"{source}: field '{name}' must be numbers, not true or false")
    if array.dtype.kind not in "iuf":
        raise SampleError(f"{source}: field '{name}' must be numbers")
    return array


def _check_per_token(
    array: npt.NDArray[Any], name: str, scored: npt.NDArray[np.bool_], source: str, *, scalar_too: bool = False
) -> None:
    """Check shape ``[n]`` and the finite entries of scored tokens, bool ``[n]``."""
    if array.ndim == 0 and scalar_too:
        if not np.isfinite(array):
            raise SampleError(f"{source}: field '{name}' is {array}; it must be finite")
        return
    if array.ndim != 1:
        raise SampleError(f"{source}: field '{name}' must be a flat list of numbers")
    if len(array) != len(scored):
        raise SampleError(
            f"{source}: field '{name}' has {len(array)} entries but 'tokens' has {len(scored)}; there must be one for "
            "each, null where 'loss_mask' is 0"
        )
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(array.astype(np.float32)) & scored
    if bad.any():
        at = int(np.argmax(bad))
        raise SampleError(
            f"{source}: field '{name}' has {array[at]} at index {at}, which 'loss_mask' scores; it must be finite there"
        )


def _check_not_probabilities(array: npt.NDArray[Any], name: str, scored: npt.NDArray[np.bool_], source: str) -> None:
    """Check that log-probabilities ``[n]`` are not probabilities."""
    bad = (array > _LOGPROB_TOLERANCE) & scored
    if bad.any():
        at = int(np.argmax(bad))
        raise SampleError(
            f"{source}: field '{name}' has {array[at]} at index {at}; a log-probability is never above 0: give the "
            "natural logarithms of probabilities"
        )
