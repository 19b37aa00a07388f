"""Rows of token ids, masks, labels and padding in trainers' shapes, read as ids and weights; signals of any record."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.json_fields import ChatError, shorten_json
from mcore_prefix_tree.data.packed_arrays import KEYS, unpack_array
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import PER_TOKEN, SamplingMask, Signals, Teacher, check_turn
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

SIGNALS = tuple(one.name for one in fields(Signals))

# Marks of rows of token ids.
TOKEN_MARKS = ("tokens", "response_tokens")
# Masks that bound the scored tokens, by the names that Hugging Face, TRL and verl give them: all of them must score it.
_BOUNDS = ("response_mask", "completion_mask", "assistant_masks")
# Fields that say which tokens are scored.
MASKS = ("loss_mask", "labels", *_BOUNDS)
# Fields that these rows have in addition to their marks, ``loss_mask`` and signals.
TOKEN_FIELDS = ("prompt_tokens", "response_length", "attention_mask", "labels", *_BOUNDS)
# Label of a token that is not scored, as in torch's cross_entropy.
_IGNORED = -100
# Keys of a teacher, and of one with a tokenizer of its own.
_TEACHER_ROWS, _OF_OWN_TOKENS = ("token_ids", "logprobs"), ("tokens", "realised", "tokenizer")

BoolArray = npt.NDArray[np.bool_]


def read_token_row(row: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return unchecked ids, loss mask (None scores all) and signals per token of a row, without padding.

    Tokens are ``tokens``, or ``prompt_tokens`` and ``response_tokens`` after them. The response is ``response_tokens``,
    or the last ``response_length`` tokens, or as many as ``response_mask`` or ``completion_mask`` have entries. Fields
    with an entry for each token may have one for each token of the response instead. Without a mask, only the response
    is scored, if it is known.

    ``attention_mask`` is 0 for padding on either side, which is removed from all fields. ``labels`` are the token ids,
    or -100 for a token that is not scored. A token that ``response_mask``, ``completion_mask`` or ``assistant_masks``
    excludes is not scored, as in TRL.

    Raises:
        ChatError: a field is malformed or contradicts another; names both.
    """
    if not row.keys() & {"response_tokens", *TOKEN_FIELDS}:
        mask = row.get("loss_mask")
        if not isinstance(mask, list | np.ndarray | None):
            raise ChatError("field 'loss_mask' must be a flat list of numbers")
        return _ids(row, "tokens"), mask, {}
    if "response_tokens" in row:
        if "response_length" in row:
            raise ChatError("fields 'response_tokens' and 'response_length' are both given; give one of them")
        if "prompt_tokens" not in row:
            raise ChatError("field 'response_tokens' needs field 'prompt_tokens', which may be an empty list")
        ids = _list(_ids(row, "prompt_tokens")) + _list(_ids(row, "response_tokens"))
        response: int | None = len(row["response_tokens"])
    else:
        if "prompt_tokens" in row:
            raise ChatError(
                "fields 'tokens' and 'prompt_tokens' are both given; give 'response_tokens' with the latter"
            )
        ids = _ids(row, "tokens")
        response = _response_length(row, len(ids))
    aligned = _Aligned(length=len(ids), response=response)
    kept = _kept(row, aligned)
    mask = _loss_mask(row, ids, aligned, kept)
    is_each = isinstance(row.get("advantage"), (list, np.ndarray))
    each = (*PER_TOKEN, "advantage") if is_each else PER_TOKEN
    signals = {name: aligned.value(row[name], name)[kept] for name in each if name in row}
    if isinstance(row.get("teacher"), dict) and set(row["teacher"]) == set(_TEACHER_ROWS):
        signals["teacher"] = {
            name: aligned.value(row["teacher"][name], f"teacher.{name}")[kept] for name in _TEACHER_ROWS
        }
    if row.get("sampling_mask") is not None:
        signals["sampling_mask"] = aligned.sets(row["sampling_mask"])[kept]
    if row.get("routed_experts") is not None:
        signals["routed_experts"] = aligned.routes(row["routed_experts"])[kept]
    return ids[kept], mask, signals


@dataclass(frozen=True, kw_only=True)
class _Aligned:
    """Give fields an entry for each of ``length`` tokens, of which the last ``response`` answer (None: unknown)."""

    length: int
    response: int | None

    def value(self, value: Any, name: str, fill: Any = None) -> Any:
        """Return a list or array with an entry for each token, ``fill`` for those of the prompt."""
        if not isinstance(value, list) and not (isinstance(value, np.ndarray) and value.ndim):
            raise ChatError(f"field '{name}' must be a list with an entry for each token")
        if len(value) == self.length:
            return value
        if self.response is None or len(value) != self.response:
            of_response = "" if self.response is None else f", of which {self.response} are the response's"
            raise ChatError(
                f"field '{name}' has {len(value)} entries, but there are {self.length} tokens{of_response}; it must "
                "have an entry for each of them"
            )
        missing = self.length - self.response
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":  # stays as exact as it is
            return np.concatenate([np.full((missing, *value.shape[1:]), fill, dtype=value.dtype), value])
        return [fill] * missing + _list(value)

    def mask(self, row: Mapping[str, Any], name: str, says: str) -> BoolArray:
        """Return a mask of 0 and 1 for each token."""
        value = self.value(row[name], name, fill=0)
        array = _array(value)
        if array.ndim != 1 or array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
            raise ChatError(f"field '{name}' must be a list of 0 and 1: {says}")
        return array.astype(bool)

    def sets(self, value: Any) -> list[Any]:
        """Return a list of ids for each token, None for those of the prompt, from such a list or ids and offsets."""
        value = with_offsets(value)
        if isinstance(value, dict) and set(value) == {"token_ids", "offsets"}:
            ids, offsets = _array(value["token_ids"]), _array(value["offsets"])
            if ids.ndim != 1 or offsets.ndim != 1 or offsets.dtype.kind not in "iu":
                raise ChatError(
                    "fields 'sampling_mask.token_ids' and 'sampling_mask.offsets' must be flat lists of integers"
                )
            ends = [0, *offsets.tolist(), len(ids)]
            if len(ends) == 2 or ends[1] != 0 or ends[-2] != len(ids) or ends != sorted(ends):
                raise ChatError(f"field 'sampling_mask.offsets' must rise from 0 to {len(ids)}, the number of ids")
            value = np.split(ids, offsets[1:-1]) if len(offsets) > 1 else []
        return _list(self.value(value, "sampling_mask"))

    def routes(self, value: Any) -> Any:
        """Return the experts of each token, None for those of the prompt; the last of the tokens may have none."""
        value = unpack_routes(value)
        if len(value) in (self.length - 1, (self.response or 0) - 1):
            value = [*value, None]
        return self.value(value, "routed_experts")


def with_offsets(mask: Any) -> Any:
    """Return kept ids with the offsets that counts, one for each token, add up to; another mask as it is."""
    if not isinstance(mask, dict) or set(mask) != {"token_ids", "counts"}:
        return mask
    counts = _array(mask["counts"])
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ChatError("field 'sampling_mask.counts' must be a list of the number of ids for each token")
    return {"token_ids": mask["token_ids"], "offsets": np.append(0, np.cumsum(counts, dtype=np.int64))}


def unpack_routes(value: Any) -> Any:
    """Return the routes of all tokens, from those of the tokens behind ``start`` that an engine computed anew."""
    given = dict(value) if isinstance(value, dict) else {"ids": value}
    start = given.pop("start", 0)
    if type(start) is not int or start < 0:
        raise ChatError(
            f"field 'routed_experts.start' is {shorten_json(start)}; it must count the tokens without a route"
        )
    if set(given) == KEYS:
        routes: Any = unpack_array(given, "routed_experts")
    elif set(given) == {"ids"} and isinstance(given["ids"], (list, np.ndarray)):
        routes = given["ids"]
    else:
        raise ChatError(
            "field 'routed_experts' must be lists [tokens, layers, top-k], or an object with "
            f"{', '.join(map(repr, sorted(KEYS)))}, and 'start' if it lacks the tokens before"
        )
    return [None] * start + list(routes) if start else routes


def _ids(row: Mapping[str, Any], name: str) -> Any:
    """Return a list or array of ids; ``Sample`` checks their range, once padding is removed."""
    value, bad = row[name], ""
    if isinstance(value, list) and not set(map(type, value)) <= {int}:
        at = next(at for at, one in enumerate(value) if type(one) is not int)
        bad = f", but index {at} is {shorten_json(value[at])}"
    elif isinstance(value, np.ndarray) and (value.ndim != 1 or (len(value) and value.dtype.kind not in "iu")):
        bad = f", not of {value.dtype} {list(value.shape)}"
    elif not isinstance(value, list | np.ndarray):
        bad = f", not {shorten_json(value)}"
    if bad:
        raise ChatError(f"field '{name}' must be a flat list of integers{bad}")
    return value


def _response_length(row: Mapping[str, Any], length: int) -> int | None:
    """Return the number of tokens of the response, if a field of a row with ``tokens`` gives it."""
    if "response_length" in row:
        found = row["response_length"]
        is_number = isinstance(found, (int, float, np.integer)) and not isinstance(found, bool)
        if not is_number or not 0 <= found <= length or found % 1:
            raise ChatError(
                f"field 'response_length' is {shorten_json(found)}; it must be the number of tokens at "
                f"the end of 'tokens' that are the response, 0 to {length}"
            )
        return int(found)
    for name in ("response_mask", "completion_mask"):
        value = row.get(name)
        if isinstance(value, (list, np.ndarray)) and len(value) < length:
            return len(value)
    return None


def _kept(row: Mapping[str, Any], aligned: _Aligned) -> slice:
    """Return the tokens that are no padding."""
    length = aligned.length
    if "attention_mask" not in row:
        return slice(0, length)
    whole = _Aligned(length=length, response=None)  # padding may lie in the prompt too
    seen = np.flatnonzero(whole.mask(row, "attention_mask", "1 for a token and 0 for padding"))
    if not len(seen):
        raise ChatError("field 'attention_mask' is 0 for all tokens, so that nothing is left of the sample; remove it")
    first, end = int(seen[0]), int(seen[-1]) + 1
    if end - first != len(seen):
        hole = int(np.flatnonzero(np.diff(seen) > 1)[0])
        raise ChatError(
            f"field 'attention_mask' is 0 at index {seen[hole] + 1} between tokens that it shows; only padding at the "
            "start and the end can be removed"
        )
    if end < length and "response_length" in row:
        raise ChatError(
            f"fields 'response_length' and 'attention_mask' do not say whether the {length - end} tokens of padding at "
            "the end count as response; give 'tokens' without padding, and no 'attention_mask'"
        )
    return slice(first, end)


def _loss_mask(row: Mapping[str, Any], ids: Any, aligned: _Aligned, kept: slice) -> Any:
    """Return the weight of each token that is kept, or None where all are scored."""
    bounds = {}
    for name in _BOUNDS:
        if name in row:
            bound = aligned.mask(row, name, "1 for a token that is scored and 0 for any other")
            if len(row[name]) < aligned.length and bound[kept.stop :].any():
                raise ChatError(
                    f"field '{name}' has no entries for the padding at the end that 'attention_mask' shows; give it an "
                    "entry for each token, or the tokens without padding"
                )
            bounds[name] = bound[kept]
    given: dict[str, BoolArray] = {}
    weights = None
    if "loss_mask" in row:
        weights = _array(aligned.value(row["loss_mask"], "loss_mask", fill=0))
        if weights.ndim != 1 or weights.dtype.kind not in "biuf":
            raise ChatError("field 'loss_mask' must be a flat list of numbers")
        weights = weights[kept]
        given["loss_mask"] = weights != 0
    if "labels" in row:
        given["labels"] = _scored_by_labels(row, ids, aligned, kept)
    _check_agreement(given, bounds, kept.start)
    if weights is not None:
        return weights
    if given or bounds:
        return given["labels"] if given else np.all(list(bounds.values()), axis=0)
    if aligned.response is None:
        return None
    return (np.arange(aligned.length) >= aligned.length - aligned.response)[kept]


def _scored_by_labels(row: Mapping[str, Any], ids: Any, aligned: _Aligned, kept: slice) -> BoolArray:
    labels = _array(aligned.value(row["labels"], "labels", fill=_IGNORED))
    if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "iu"):
        raise ChatError("field 'labels' must be a flat list of integers: token ids, or -100 for unscored tokens")
    tokens = np.asarray(ids)
    scored: BoolArray = np.asarray(labels != _IGNORED)
    wrong = (scored & (labels != tokens))[kept]
    if not wrong.any():
        return scored[kept]
    at = int(np.argmax(wrong)) + kept.start
    # The last one has nothing behind it to be compared with.
    behind = slice(kept.start, kept.stop - 1)
    shifted = (labels[:-1] == tokens[1:])[behind]
    if scored[:-1][behind].any() and shifted[scored[:-1][behind]].all():
        raise ChatError(
            f"field 'labels' is shifted by one: index {at} has the token of index {at + 1}; give labels[t] = tokens[t] "
            "for scored tokens, as Hugging Face does, and -100 for others"
        )
    raise ChatError(
        f"field 'labels' is {labels[at]} at index {at}, but the token there is {tokens[at]}; a label is its token, or "
        "-100 for an unscored token"
    )


def _check_agreement(given: Mapping[str, BoolArray], bounds: Mapping[str, BoolArray], start: int) -> None:
    """Check that fields, bool ``[n]`` each, agree on every token but the first, which nothing predicts."""
    for name, scored in given.items():
        against = {other: one != scored for other, one in given.items()}
        for other, differs in (against | {other: scored & ~bound for other, bound in bounds.items()}).items():
            if differs[1:].any():
                raise ChatError(
                    f"fields '{name}' and '{other}' contradict each other at index "
                    f"{int(np.argmax(differs[1:])) + 1 + start}: only one of them scores the token; give one of them"
                )


def _list(value: Any) -> list[Any]:
    listed: list[Any] = value.tolist() if isinstance(value, np.ndarray) else value
    return listed


def _array(value: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a value as an array ``[...]``; without a dimension if it is not one."""
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.empty(())


def signals_of_tokens(row: Mapping[str, Any]) -> Signals | None:
    """Return the signals of a record with ``tokens``, None if it has none; ``Sample`` checks the values."""
    given: dict[str, Any] = {name: row[name] for name in SIGNALS if row.get(name) is not None}
    readers = {"teacher": _teacher, "sampling_mask": _sampling_mask, "routed_experts": unpack_routes}
    given |= {name: read(given[name]) for name, read in readers.items() if name in given}
    return Signals(**given) if given else None


def _teacher(value: Any) -> Teacher:
    if not isinstance(value, dict) or set(value) not in ({*_TEACHER_ROWS}, {*_TEACHER_ROWS, *_OF_OWN_TOKENS}):
        raise ChatError(
            "field 'teacher' must be an object with 'token_ids' and 'logprobs'; a teacher with another tokenizer has "
            "'tokens', 'realised' and 'tokenizer' too"
        )
    return Teacher(**value)


def _sampling_mask(value: Any) -> SamplingMask:
    value = with_offsets(value)
    if isinstance(value, dict) and set(value) == {"token_ids", "offsets"}:
        return SamplingMask(**value)
    if isinstance(value, (list, np.ndarray)):
        try:
            return SamplingMask.from_rows(list(value))
        except (ValueError, TypeError):  # a list in a list of lists, or a text
            pass
    raise ChatError(
        "field 'sampling_mask' must be a list of ids for each token, or an object with 'token_ids' and 'offsets'"
    )


def warn_placeholder(sample: Sample) -> None:
    """Warn of a route that engines write for a token without one: the first experts in every layer, mid-sample."""
    routes = sample.signals.routes
    if routes is None or routes.ids[0].size < 4:  # too few to tell
        return
    given = routes.ids[:-1]
    is_placeholder = (given == np.arange(given.shape[2])).all(axis=(1, 2))
    real = np.flatnonzero(~is_placeholder & (given[:, 0, 0] >= 0))
    found = np.flatnonzero(is_placeholder[: real[-1]]) if len(real) else real
    if len(found) and is_first_rank():
        logger.warning(
            "%s: field 'routed_experts' sends the token at index %d to the first experts of every layer, as engines "
            "write for a token without a route; give null there if it is one",
            sample.source,
            found[0],
        )


def signals_of_conversation(row: Mapping[str, Any]) -> Signals | None:
    """Return the signals of a record with ``messages``; a field with an entry for each token is an error."""
    for name in (*PER_TOKEN, "teacher", "sampling_mask", "routed_experts"):
        if row.get(name) is not None:
            raise ChatError(f"field '{name}' goes with 'tokens'; it has an entry for each of them")
    if isinstance(row.get("advantage"), (list, np.ndarray)):
        raise ChatError("field 'advantage' must be a single number with 'messages'")
    return signals_of_tokens(row)


def signals_of_turns(signals: Signals, source: str, turns: int) -> list[Signals]:
    """Return the signals of each turn of a conversation, parts of one rollout from 0 or the record's ``turn`` on."""
    check_turn(signals.turn, source)
    first = signals.turn or 0
    if signals.turn is None and isinstance(signals.reward, (list, np.ndarray)) and len(signals.reward) != turns:
        raise ChatError(
            f"field 'reward' has {len(signals.reward)} entries, but 'messages' has {turns} assistant turns; give one "
            "reward for every turn, or a single number"
        )
    if signals.pair is not None and turns > 1:
        raise ChatError(
            f"field 'pair' compares complete conversations, but this one becomes {turns} samples; set "
            "data.expand_turns=false"
        )
    rollout = source if signals.rollout is None else signals.rollout
    return [replace(signals, rollout=rollout, turn=turn) for turn in range(first, first + turns)]
