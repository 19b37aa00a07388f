"""Keys of one chat message that decide which of its tokens are trained on: switches and thinking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.data.chat_error import ChatError
from mcore_prefix_tree.data.json_fields import json_kind

# Switches that public data sets for each message, and whether they switch training on. A number is a weight.
_SWITCHES = {
    "loss": True,
    "loss_mask": True,
    "step_loss_mask": True,
    "train": True,
    "trainable": True,
    "training": True,
    "weight": True,
    "masked": False,
}
# Defined for assistant messages only, by OpenAI and slime: on other messages their defaults mean nothing.
_ASSISTANT_ONLY = frozenset({"masked", "step_loss_mask", "weight"})
# Other keys that would change the training content.
_REFUSED = {
    "function_call": "give it as tool_calls",
    "mask": "say which messages are trained on with 'loss'",
    "train_detail": "give 'tokens' with a 'loss_mask'",
    "training_detail": "give 'tokens' with a 'loss_mask'",
}
# Names of an assistant's thinking, in data and in chat templates.
THINKING = ("reasoning_content", "reasoning", "thinking")
# Keys that parse_messages interprets; chat templates are given the others as they are.
INTERPRETED = frozenset({"role", "content", "tool_calls", "tool_call_id", *THINKING, *_SWITCHES, *_REFUSED})


def check_refused_keys(message: Mapping[str, Any], field: str) -> None:
    """Raise ChatError for a key that changes the training content and is not supported."""
    for name, way_out in _REFUSED.items():
        if message.get(name) is not None:
            raise ChatError(f"field '{field}.{name}' changes what is trained on, and is not supported: {way_out}")


def weight_of(message: Mapping[str, Any], role: str, field: str) -> float:
    """Return the weight of an assistant message's tokens: 0 if a switch turns it off, 1 without a switch.

    Raises ChatError for a malformed or contradictory switch, or one that trains a message that is not the assistant's.
    """
    weights = {name: _weight(message[name], name, field) for name in _SWITCHES if message.get(name) is not None}
    if role != "assistant":
        asks = next((name for name, weight in weights.items() if weight and name not in _ASSISTANT_ONLY), None)
        if asks is not None:
            raise ChatError(
                f"field '{field}.{asks}' asks to train on a message of role '{role}', but only assistant messages are "
                f"scored; remove it or set it to 0, or give 'tokens' with a 'loss_mask'"
            )
        return 1.0  # nobody reads it
    if len(set(weights.values())) > 1:
        (first, one), (second, other) = _contradiction(weights)
        raise ChatError(
            f"fields '{field}.{first}' and '{field}.{second}' contradict each other: their weights are {one:g} and "
            f"{other:g}; give one of them"
        )
    return next(iter(weights.values()), 1.0)


def _contradiction(weights: Mapping[str, float]) -> tuple[tuple[str, float], tuple[str, float]]:
    first, *others = weights.items()
    return first, next(other for other in others if other[1] != first[1])


def _weight(value: object, name: str, field: str) -> float:
    if not isinstance(value, (bool, int, float)) or not (math.isfinite(value) and value >= 0):
        raise ChatError(f"field '{field}.{name}' must be true, false or a number of at least 0, not {_shown(value)}")
    if _SWITCHES[name]:
        return float(value)
    if value not in (0, 1):
        raise ChatError(f"field '{field}.{name}' must be true, false, 0 or 1, not {_shown(value)}")
    return 1.0 - value


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else json_kind(value)


def thinking_of(message: Mapping[str, Any], role: str, field: str) -> str:
    """Return the thinking that a message keeps apart, or ""; raise ChatError for other types, names or roles."""
    given = {}
    for name in THINKING:
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise ChatError(f"field '{field}.{name}' must be a string, not {json_kind(value)}")
        if value:
            given[name] = value
    if not given:
        return ""
    if role != "assistant":
        raise ChatError(f"field '{field}.{next(iter(given))}' belongs to an assistant message, not to role '{role}'")
    if len(set(given.values())) > 1:
        names = " and ".join(f"'{field}.{name}'" for name in given)
        raise ChatError(f"fields {names} hold different texts; give one of them")
    return next(iter(given.values()))
