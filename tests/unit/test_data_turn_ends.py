"""Ends and beginnings of turns that few chat formats have, each with a template of its structure."""

import json
from dataclasses import replace

import pytest
from harness.chat_families import FAMILIES

from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.sample import SampleError

pytest.importorskip("transformers")

CHATML = next(family for family in FAMILIES if family.name == "chatml")
USER = "{%- if m.role == 'user' -%}{{ '<|u|>' + m.content + '<|e|>' }}{%- endif -%}"
QUESTION = {"role": "user", "content": "a"}


def template_of(turn, end):
    """Return a template from its text for an assistant message, and for the end of a conversation."""
    assistant = "{%- if m.role == 'assistant' -%}" + turn + "{%- endif -%}"
    return "{%- for m in messages -%}" + USER + assistant + "{%- endfor -%}" + end


def opens(prompt):
    return "{%- if add_generation_prompt -%}{{ '" + prompt + "' }}{%- endif -%}"


def scored(tmp_path, answer, template, *, eos="<|e|>", **keys):
    """Return the text of a one-turn conversation, ``[[`` and ``]]`` around scored text."""
    control = ("<|u|>", "<|a|>", "<|r|>", "<|e|>", "<|end|>")
    family = replace(CHATML, template=template, control=control, words=(), eos=eos)
    tokenizer = load_tokenizer(family.make(tmp_path / "tokenizer"))
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [QUESTION, {"role": "assistant", "content": answer, **keys}]}))
    (sample,) = read_samples(path, tokenizer=tokenizer)
    tokens, mask = sample.tokens.tolist(), sample.loss_mask != 0
    start, end = int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
    return (
        f"{tokenizer.decode(tokens[:start])}[[{tokenizer.decode(tokens[start:end])}]]{tokenizer.decode(tokens[end:])}"
    )


TWO_ENDS = template_of("{{ '<|a|>' + m.content + '<|r|><|e|>' }}", opens("<|a|>"))


ENDED = template_of("{{ '<|a|>' + m.content + '<|e|>\n' }}", "{{ '' if add_generation_prompt else '<|end|>' }}")
NO_BLOCK = template_of("{{ '<|a|>' + m.content + '<|e|>' }}", opens("<|a|><think>\\n"))
# Nemotron's in structure: its prompt closes the block if thinking is off.
SWITCHED = template_of(
    "{{ '<|a|><think>' + ('\n' + m.reasoning_content if m.reasoning_content else '') }}"
    "{{ '</think>' + m.content + '<|e|>' }}",
    "{%- if add_generation_prompt -%}{{ '<|a|><think>' + ('\n' if DEFAULT else '</think>') }}{%- endif -%}",
)
SWITCHES = [SWITCHED.replace("DEFAULT", f"enable_thinking is {default}") for default in ("not false", "true")]
# An answer, a template, keys of the message or the tokenizer, and the text behind the question.
MARKED = {
    **{f"two ends, {eos}": ("b", TWO_ENDS, {"eos": eos}, "[[b<|r|><|e|>]]") for eos in ("<|e|>", "<|end|>")},
    "cut": ("b", TWO_ENDS, {"finish_reason": "length"}, "[[b]]<|r|><|e|>"),
    "an end of the conversation": ("b", ENDED + opens("<|a|>"), {"eos": "<|end|>"}, "[[b<|e|>]]"),
    "an opened block": ("b", NO_BLOCK, {}, "[[b<|e|>]]"),
    "an opened block, thought": ("<think>\nc</think>b", NO_BLOCK, {}, "<think>\n[[c</think>b<|e|>]]"),
    **{f"thinking off, {at}": ("b", one, {}, "<think></think>[[b<|e|>]]") for at, one in enumerate(SWITCHES)},
    **{
        f"thinking on, {at}": ("b", one, {"reasoning_content": "c"}, "<think>\n[[c</think>b<|e|>]]")
        for at, one in enumerate(SWITCHES)
    },
}


@pytest.mark.parametrize("case", MARKED)
def test_turns_are_scored_from_the_prompt_to_their_last_token(tmp_path, case):
    answer, template, keys, text = MARKED[case]
    assert scored(tmp_path, answer, template, **keys) == f"<|u|>a<|e|><|a|>{text}"


CALL = "{%- for c in m.tool_calls or [] -%}{{ '<|r|>' + c.function.name + c.function.arguments }}{%- endfor -%}"


@pytest.mark.parametrize("arguments", ['{"k":1}', {"k": 1}])
def test_a_template_that_joins_arguments_gets_their_text(tmp_path, arguments):
    template = template_of("{{ '<|a|>' + m.content }}" + CALL + "{{ '<|e|>' }}", opens("<|a|>"))
    text = scored(tmp_path, "", template, tool_calls=[{"name": "f", "arguments": arguments}])
    assert text.replace(" ", "") == '<|u|>a<|e|><|a|>[[<|r|>f{"k":1}<|e|>]]'


DROPS = {
    "thinking": ({"reasoning": "c"}, "'messages[1]' has thinking (reasoning_content, reasoning, thinking) that"),
    "inline thinking": ({"content": "<think>c</think>b"}, "'messages[1]' has thinking"),
    "tool calls": ({"tool_calls": [{"name": "f", "arguments": {}}]}, "'messages[1]' has tool_calls that"),
}


@pytest.mark.parametrize("dropped", DROPS)
def test_a_template_that_drops_a_part_of_a_turn_is_refused(tmp_path, dropped):
    keys, message = DROPS[dropped]
    template = template_of("{{ '<|a|>' + m.content.split('</think>')[-1] + '<|e|>' }}", opens("<|a|>"))
    with pytest.raises(SampleError) as caught:
        scored(tmp_path, **{"answer": keys.pop("content", "b")}, template=template, **keys)
    assert message in str(caught.value)
    assert scored(tmp_path, "<think>c</think>b", template, loss=0).startswith("[[")  # nothing of it is trained on


def test_a_template_that_drops_a_role_is_refused(tmp_path):
    template = template_of("{{ '<|a|>' + m.content + '<|e|>' }}", opens("<|a|>"))
    family = replace(CHATML, template=template, control=("<|u|>", "<|a|>", "<|e|>"), words=(), eos="<|e|>")
    path = tmp_path / "data.jsonl"
    rows = [QUESTION, {"role": "assistant", "content": "f()"}, {"role": "tool", "content": "1"}]
    path.write_text(json.dumps({"messages": [*rows, {"role": "assistant", "content": "b"}]}))
    with pytest.raises(SampleError, match=r"field 'messages\[2\]' has role 'tool', which the chat template of"):
        read_samples(path, tokenizer=load_tokenizer(family.make(tmp_path / "tokenizer")))


def test_a_template_that_ends_no_turn_is_warned_of_once(tmp_path, caplog):
    template = template_of("{{ 'Answer: ' + m.content + '\n' }}", opens("Answer: "))
    text = scored(tmp_path, "b", template.replace("<|u|>", "Question: ").replace("<|e|>", "\n"))
    assert text.endswith("[[b\n]]")
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "its chat template ends an assistant turn with no token, so that nothing trains the model to stop; add the "
        "end-of-turn token to the template"
    ]


def test_what_a_template_writes_behind_a_cut_turn_is_not_the_models(tmp_path):
    template = template_of("{{ 'Answer: ' + m.content + '\n\n' }}", opens("Answer: "))
    text = scored(tmp_path, "b", template.replace("<|u|>", "Question: ").replace("<|e|>", "\n"), finish_reason="length")
    assert text.endswith("[[b]]\n\n")


def test_a_conversation_that_the_assistant_begins(tmp_path):
    template = template_of("{{ '<|a|>' + m.content + '<|e|>' }}", opens("<|a|>"))
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "b"}, QUESTION]}))
    family = replace(CHATML, control=("<|u|>", "<|a|>", "<|e|>"), words=(), eos="<|e|>", template=template)
    (sample,) = read_samples(path, tokenizer=load_tokenizer(family.make(tmp_path / "any")))
    assert sample.loss_mask.tolist() == [0, 1, 1]
    needs_one = replace(family, template="{{ messages[0].role[:0] }}" + template)
    with pytest.raises(SampleError, match=r"field 'messages\[0\]' is an assistant message with no message before it"):
        read_samples(path, tokenizer=load_tokenizer(needs_one.make(tmp_path / "needs one")))
