"""Tokens and masks of TRL's formats against its own functions: the samples that its trainers would train on.

Needs TRL: ``pip install --no-deps -r requirements/peers.txt``.
"""

from __future__ import annotations

import json

import pytest

trl = pytest.importorskip("trl.data_utils", reason="TRL is not installed")
from harness.tokenizer_folders import CHATML, PLAIN, make_folder, official  # noqa: E402

from mcore_prefix_tree.data import load_tokenizer, read_samples  # noqa: E402

SYSTEM, USER = {"role": "system", "content": "You are terse."}, {"role": "user", "content": "look up  the\n\nparcel"}
YES, NO = {"role": "assistant", "content": " it is lost"}, {"role": "assistant", "content": "sorry"}
PROMPT = [SYSTEM, USER, YES, {"role": "user", "content": "bye"}]
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"id": 7}}}],
}  # fmt: skip
ROWS = [
    {"prompt": "The sky is", "completion": " blue."},
    {"prompt": "The sky is ", "completion": "blue.", "label": True},
    {"prompt": "look up  ", "completion": " the\n\nparcel"},
    {"prompt": "look up ", "chosen": " the parcel", "rejected": "the"},
    {"chosen": "look up the parcel", "rejected": "look up the sky"},
    {"prompt": PROMPT, "completion": [NO]},
    {"prompt": PROMPT, "completion": [NO], "label": False},
    {"prompt": PROMPT, "completion": [CALL]},
    {"prompt": PROMPT, "chosen": [YES], "rejected": [NO]},
    {"chosen": [*PROMPT, YES], "rejected": [*PROMPT, NO]},
]
# TRL scores the line break that a template writes behind the end of a turn, which a model does not generate.
TEMPLATES = {"chatml": CHATML.replace("<|im_end|>\n", "<|im_end|>"), "plain": PLAIN.replace("\n{%", "<|im_end|>{%")}


def theirs(tokenizer, row):
    """Tokens and start of each completion, as SFT, KTO and DPO make them in TRL 1.16."""
    if "chosen" in row and "prompt" not in row:
        row = trl.extract_prompt(row)
    completions = [row[name] for name in ("completion", "chosen", "rejected") if name in row]
    if trl.is_conversational(row):
        prompt = trl._tokenize(tokenizer, row["prompt"], add_generation_prompt=True)["input_ids"]
    else:
        prompt = trl._tokenize(tokenizer, row["prompt"])["input_ids"]
        completions = [f"{one}{tokenizer.eos_token}" for one in completions]
    whole = [trl._tokenize(tokenizer, row["prompt"] + one)["input_ids"] for one in completions]
    start = min(trl.common_prefix_length(prompt, one) for one in whole)
    return [(one, start) for one in whole]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
@pytest.mark.parametrize("variant", [{}, {"prepend_space": True}], ids=["byte level", "metaspace"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_masks_are_those_of_trl(tmp_path, template, variant, row):
    folder = make_folder(tmp_path / "tokenizer", TEMPLATES[template], **variant)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    samples = read_samples(tmp_path / "rows.jsonl", tokenizer=load_tokenizer(folder))
    expected = theirs(official(folder), row)
    assert len(samples) == len(expected)
    for sample, (tokens, start) in zip(samples, expected, strict=True):
        assert sample.tokens.tolist() == tokens
        assert sample.loss_mask.tolist() == [0.0] * start + [1.0] * (len(tokens) - start)
