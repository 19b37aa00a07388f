"""Training signals of one record: rewards, log-probabilities, preferences, a teacher."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.token_rows import unpack_routes, with_offsets
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import PER_TOKEN, SamplingMask, Signals, Teacher, check_turn
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

_NAMES = tuple(field.name for field in fields(Signals))
_ROWS, _OF_OWN_TOKENS = {"token_ids", "logprobs"}, {"tokens", "realised", "tokenizer"}


def signals_of_tokens(row: Mapping[str, Any]) -> Signals | None:
    """Return the signals of a record with ``tokens``, None if it has none; ``Sample`` checks the values."""
    given: dict[str, Any] = {name: row[name] for name in _NAMES if row.get(name) is not None}
    readers = {"teacher": _teacher, "sampling_mask": _sampling_mask, "routed_experts": unpack_routes}
    given |= {name: read(given[name]) for name, read in readers.items() if name in given}
    return Signals(**given) if given else None


def _teacher(value: Any) -> Teacher:
    if not isinstance(value, dict) or set(value) not in (_ROWS, _ROWS | _OF_OWN_TOKENS):
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
