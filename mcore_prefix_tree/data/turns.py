"""Keys of one chat message that decide which of its tokens are trained on: switches and thinking."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mcore_prefix_tree.data.json_fields import ChatError, json_kind

# Switches that public data sets for each message, and whether they switch training on. A number is a weight.
SWITCHES = {
    "loss": True,
    "loss_mask": True,
    "loss_scale": True,
    "loss_weight": True,
    "step_loss_mask": True,
    "is_train": True,
    "train": True,
    "train_on_turn": True,
    "trainable": True,
    "training": True,
    "weight": True,
    "ignore_loss": False,
    "is_masked": False,
    "masked": False,
}
# Defined for assistant messages only, by OpenAI and slime among others: on other messages their defaults mean nothing.
_ASSISTANT_ONLY = frozenset(
    {"ignore_loss", "is_masked", "loss_scale", "loss_weight", "masked", "step_loss_mask", "weight"}
)
# Other keys that would change what is trained on.
_REFUSED = {
    "function_call": "give it as tool_calls",
    "mask": "say which messages are trained on with 'loss'",
    "train_detail": "give 'tokens' with a 'loss_mask'",
    "training_detail": "give 'tokens' with a 'loss_mask'",
}
# Words of other keys that may say so too, each of them; what their values mean is not known.
_SWITCH_WORDS = frozenset(
    {"learn", "learnable", "loss", "losses", "mask", "masked", "masks", "supervise", "supervised", "train", "trainable",
     "trained", "training", "weight", "weights"}
)  # fmt: skip
# The same, if they are true.
_LEAVING_OUT = frozenset({"exclude", "excluded", "ignore", "ignored"})
# Names of an assistant's thinking, in data and in chat templates.
THINKING = ("reasoning_content", "reasoning", "thinking")
# Other names of what a message says, which few chat templates read, and the names that are read here.
_SAID = {"refusal": "content"} | dict.fromkeys(
    (
        "analysis", "chain_of_thought", "reasoning_details", "reasoning_text", "thinking_blocks", "thinking_content",
        "thought", "thoughts",
    ),
    "reasoning_content",
)  # fmt: skip
# Keys that parse_messages interprets; chat templates are given the others as they are.
INTERPRETED = frozenset({"role", "content", "tool_calls", "tool_call_id", *THINKING, *SWITCHES, *_REFUSED})


def check_refused_keys(message: Mapping[str, Any], field: str) -> None:
    """Raise ChatError for a key that changes the training content, or seems to, and is not supported."""
    for name, way_out in _REFUSED.items():
        if message.get(name) is not None:
            raise ChatError(f"field '{field}.{name}' changes what is trained on, and is not supported: {way_out}")
    if message.get("role") != "assistant":
        return
    for name, value in message.items():
        if name not in INTERPRETED and _seems_switch(name, value):
            raise ChatError(
                f"field '{field}.{name}' is not read, though its name says that it switches training on or off; call "
                "it 'loss', with 0 for a message that is not trained on, or rename it"
            )


def check_part(part: Mapping[str, Any], field: str) -> None:
    """Raise ChatError for a switch of a part of a message: a message is trained on as a whole."""
    for name, value in part.items():
        if value is not None and (name in SWITCHES or name in _REFUSED or _seems_switch(name, value)):
            raise ChatError(
                f"field '{field}.{name}' switches training of a part of a message, but a message is trained on as a "
                "whole; give the switch to the message, or 'tokens' with a 'loss_mask'"
            )


def check_record(row: Mapping[str, Any], messages: list[Any]) -> None:
    """Raise ChatError for switches beside the messages: one that is off, or a list with an entry for each message."""
    answers = sum(isinstance(message, dict) and "assistant" in message.values() for message in messages)
    for name, is_on in SWITCHES.items():
        value = row.get(name)
        is_off = isinstance(value, (bool, int, float)) and value == (0 if is_on else 1)
        if is_off or (
            isinstance(value, list) and len(value) in (len(messages), answers) and _seems_switch(name, value)
        ):
            raise ChatError(
                f"field '{name}' of the record is not read, though it switches training off in a message; give it to "
                f"each message, mark what must not count with 'exclude', or leave it unread: "
                f"data.fields={{{name}: null}}"
            )


def check_said(
    said: Mapping[str, Any], field: str, *, has_thinking: bool, is_read: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise ChatError for text of a scored message that is under a name which is not read.

    Args:
        said: keys of the message that are not interpreted.
        field: name of the message, for errors.
        has_thinking: whether the message has thinking under a name that is read, which another one repeats.
        is_read: function that returns whether the chat template writes what a key holds.
    """
    for name, ours in _SAID.items():
        if said.get(name) and not (has_thinking and ours != "content") and not is_read(name):
            raise ChatError(
                f"field '{field}.{name}' is not read, so that the model would not be trained on it; call it '{ours}', "
                "or remove it"
            )


def _seems_switch(name: str, value: object) -> bool:
    """Return whether a key that is not read may say what is trained on: a flag or a list of them, or a weight."""
    values = value if isinstance(value, list) and value else [value]
    if not all(isinstance(one, (bool, int, float)) for one in values):
        return False
    words = set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))
    if not all(one in (0, 1) for one in values) and not words & {"weight", "weights"}:
        return False
    return bool(words & _SWITCH_WORDS) or (value is True and bool(words & _LEAVING_OUT))


def read_weight(message: Mapping[str, Any], role: str, field: str) -> float:
    """Return the weight of an assistant message's tokens: 0 if a switch turns it off, 1 without a switch.

    Raises ChatError for a malformed or contradictory switch, or one that trains a message that is not the assistant's.
    """
    weights = {name: _weight(message[name], name, field) for name in SWITCHES if message.get(name) is not None}
    if role != "assistant":
        asks = next((name for name, weight in weights.items() if weight and name not in _ASSISTANT_ONLY), None)
        if asks is not None:
            raise ChatError(
                f"field '{field}.{asks}' asks to train on a message of role '{role}', but only assistant messages are "
                f"scored; remove it or set it to 0, or give 'tokens' with a 'loss_mask'"
            )
        return 1.0  # nobody reads it
    if len(set(weights.values())) > 1:
        (first, one), *others = weights.items()
        second, other = next(pair for pair in others if pair[1] != one)
        raise ChatError(
            f"fields '{field}.{first}' and '{field}.{second}' contradict each other: their weights are {one:g} and "
            f"{other:g}; give one of them"
        )
    return next(iter(weights.values()), 1.0)


def _weight(value: object, name: str, field: str) -> float:
    if not isinstance(value, (bool, int, float)) or not 0 <= value <= sys.float_info.max:
        raise ChatError(f"field '{field}.{name}' must be true, false or a number of at least 0, not {_shown(value)}")
    if SWITCHES[name]:
        return float(value)
    if value not in (0, 1):
        raise ChatError(f"field '{field}.{name}' must be true, false, 0 or 1, not {_shown(value)}")
    return 1.0 - value


def _shown(value: object) -> str:
    if not isinstance(value, (int, float)):
        return json_kind(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) < 20 else f"one of {len(text)} digits"


def read_thinking(message: Mapping[str, Any], role: str, field: str) -> str:
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
