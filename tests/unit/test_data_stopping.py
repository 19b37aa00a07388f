"""How records say that a generation was cut, in the spellings of engines and services."""

from __future__ import annotations

import pytest

from mcore_prefix_tree.data.chat import ChatError
from mcore_prefix_tree.data.stopping import STOP_NAMES, read_cut, read_cuts

LIMITS = (
    "length", "LENGTH", "MAX_TOKENS", "FinishReason.MAX_TOKENS", "FINISH_REASON_LENGTH", "abort", "max-tokens",
    "MaxTokens", "max tokens", "STOP_REASON_MAX_TOKENS", "context_length_exceeded", "stop_sequence",
    {"type": "length", "length": 16},
)  # fmt: skip
ENDED = (
    {},
    {"finish_reason": "stop"},
    {"finish_reason": "eos"},
    {"finish_reason": "tool_calls"},
    {"stop_reason": "end_turn"},
    {"finish_reason": "max_turns"},
    {"finish_reason": "stop", "stop_reason": "end_turn"},
    {"finish_reason": "stop", "stop_reason": 151645},
    {"finish_reason": {"type": "stop", "matched": 151645}},
    {"finish_reason": None, "stop_reason": None, "truncated": None, "is_truncated": 0},
)


@pytest.mark.parametrize("reason", LIMITS, ids=str)
def test_limit_cuts(reason):
    for key in ("finish_reason", "stop_reason"):
        assert read_cut({key: reason}) == ""
        assert read_cuts({key: reason}, 3, "completions") == [""] * 3


@pytest.mark.parametrize("given", ENDED)
def test_ended(given):
    assert read_cut(given) is None
    assert read_cuts(given, 3, "completions") == [None] * 3


def test_text_that_stopped_the_model_is_returned():
    for text in ("</answer>", "<|im_end|>"):
        assert read_cut({"finish_reason": "stop", "stop_reason": text}) == text
        assert read_cut({"finish_reason": {"type": "stop", "matched": text}}) == text
        assert read_cut({"finish_reason": "stop", "stop_reason": text}, of_harness=True) == text
    assert read_cut({"finish_reason": "stop", "stop_reason": "task_done"}) == "task_done"
    assert read_cut({"finish_reason": "stop", "stop_reason": "task_done"}, of_harness=True) is None


@pytest.mark.parametrize("name", STOP_NAMES)
def test_other_names_are_refused(name):
    with pytest.raises(ChatError, match=f"field '{name}' is not read.*call it 'finish_reason'.*{name}: null"):
        read_cut({name: "length"})
    with pytest.raises(ChatError, match=rf"field 'messages\[2\].{name}' is not read"):
        read_cut({name: True}, "messages[2].")
    with pytest.raises(ChatError, match=f"field '{name}' is not read"):
        read_cuts({name: [True]}, 1, "responses")


@pytest.mark.parametrize("given", [{"meta_info": {"finish_reason": {"type": "length"}}}, {"status": "truncated"}])
def test_metadata_of_a_message_is_refused(given):
    with pytest.raises(ChatError, match="is not read, though it says how the generation ended"):
        read_cut(given, "messages[1].")
    assert read_cut({"status": "completed", "metadata": {"finish_reason": 3}}, "messages[1].") is None


@pytest.mark.parametrize("value", [True, ["length"], 1.5, {"kind": ["length"]}], ids=str)
@pytest.mark.parametrize("key", ["finish_reason", "stop_reason"])
def test_values_of_other_types(key, value):
    for where in ("", "messages[2]."):
        if not isinstance(value, dict):
            with pytest.raises(ChatError) as raised:
                read_cut({key: value}, where)
            assert f"field '{where}{key}' is " in str(raised.value)
            assert "it must be text" in str(raised.value)


def test_each_completion_has_its_entry():
    assert read_cuts({"finish_reasons": ["stop", "length", None]}, 3, "responses") == [None, "", None]
    assert read_cuts({"finish_reason": ["length", "stop"]}, 2, "responses") == ["", None]
    assert read_cuts({"finish_reason": "stop", "stop_reasons": ["</a>", None]}, 2, "responses") == ["</a>", None]
    with pytest.raises(ChatError, match="field 'finish_reasons' must be a list of 2 entries, one for each of 'resp"):
        read_cuts({"finish_reasons": ["stop"]}, 2, "responses")
    with pytest.raises(ChatError, match="field 'finish_reason' is true"):
        read_cuts({"finish_reasons": ["stop", True]}, 2, "responses")
