"""How records name that a generation was cut: the spellings of engines and services."""

from __future__ import annotations

import pytest

from mcore_prefix_tree.data.chat import ChatError
from mcore_prefix_tree.data.stopping import was_cut, were_cut

CUT = (
    {"finish_reason": "length"},
    {"finish_reason": "LENGTH"},
    {"stop_reason": "max_tokens"},
    {"stop_reason": "length"},
    {"finish_reason": "MAX_TOKENS"},
    {"finish_reason": "FinishReason.MAX_TOKENS"},
    {"finish_reason": "FINISH_REASON_LENGTH"},
    {"finish_reason": {"type": "length", "length": 16}},
    {"finish_reason": "abort"},
    {"finish_reason": "max-tokens"},
    {"finish_reason": "MaxTokens"},
    {"finish_reason": "max tokens"},
    {"finish_reason": "STOP_REASON_MAX_TOKENS"},
    {"finish_reason": "context_length_exceeded"},
    {"finish_reason": "stop_sequence"},
    {"finish_reason": "stop", "stop_reason": "</answer>"},
    {"finish_reason": {"type": "stop", "matched": "</answer>"}},
    {"finishReason": "MAX_TOKENS"},
    {"stopReason": "max_tokens"},
    {"done_reason": "length"},
    {"stop_type": "limit"},
    {"finish_details": {"type": "max_tokens"}},
    {"incomplete_details": {"reason": "max_output_tokens"}},
    {"is_truncated": True},
    {"truncated": True},
    {"truncated": 1},
    {"finish_reason": "stop", "truncated": 1.0},
)
ENDED = (
    {},
    {"finish_reason": "stop"},
    {"finish_reason": "eos"},
    {"finish_reason": "tool_calls"},
    {"stop_reason": "end_turn"},
    {"finish_reason": "max_turns"},
    {"finish_reason": "stop", "stop_reason": "end_turn"},
    {"finishReason": "STOP"},
    {"stop_type": "eos"},
    {"incomplete_details": None, "is_truncated": 0},
    {"finish_reason": "stop", "stop_reason": 151645},
    {"finish_reason": {"type": "stop", "matched": 151645}},
    {"finish_reason": None, "stop_reason": None, "truncated": None},
    {"truncated": False},
    {"truncated": 0},
)


@pytest.mark.parametrize("given", CUT)
def test_cut(given):
    assert was_cut(given)
    assert were_cut(given, 3, "completions") == [True] * 3


@pytest.mark.parametrize("given", ENDED)
def test_ended(given):
    assert not was_cut(given)
    assert were_cut(given, 3, "completions") == [False] * 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"finish_reason": True}, "field 'finish_reason' is true; it must be text"),
        ({"finish_reason": ["length"]}, "field 'finish_reason' is [\"length\"]; it must be text"),
        ({"finish_reason": {"kind": "length"}}, "field 'finish_reason' is "),
        ({"stop_reason": 1.5}, "field 'stop_reason' is 1.5; it must be text"),
        ({"truncated": "yes"}, "field 'truncated' is \"yes\"; it must be true or false"),
        ({"truncated": 7}, "field 'truncated' is 7; it must be true or false"),
        ({"truncated": True, "finish_reason": 0.5}, "field 'finish_reason' is 0.5"),
    ],
)
def test_values_of_other_types(given, says):
    with pytest.raises(ChatError) as raised:
        was_cut(given)
    assert says in str(raised.value)
    with pytest.raises(ChatError, match=r"^field 'messages\[2\]\."):
        was_cut(given, "messages[2].")


def test_each_completion_has_its_entry():
    assert were_cut({"finish_reasons": ["stop", "length", None]}, 3, "responses") == [False, True, False]
    both = {"truncated": [True, False, False], "stop_reasons": ["end_turn", "end_turn", "max_tokens"]}
    assert were_cut(both, 3, "responses") == [True, False, True]
    assert were_cut({"finish_reason": ["length", "stop"]}, 2, "responses") == [True, False]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"finish_reasons": ["stop"]}, "field 'finish_reasons' must be a list of 2 entries, one for each of 'resp"),
        ({"finish_reasons": ["stop", True]}, r"field 'finish_reasons\[1\]' is true"),
        ({"truncated": [0, 2]}, r"field 'truncated\[1\]' is 2; it must be true or false"),
    ],
)
def test_lists_that_do_not_fit(given, says):
    with pytest.raises(ChatError, match=says):
        were_cut(given, 2, "responses")
