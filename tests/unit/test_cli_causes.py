"""``inspect`` explains why samples share less than they should, and which settings fold more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness.commands import run_command, write_rows
from harness.tokenizer_folders import CHATML, THINKING, make_folder

from mcore_prefix_tree.cli.alternatives import expand_sample
from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.sample import Sample

POLICY = "You are the desk assistant of a library. Ask for the card number first. Be polite and short."


def said(*arguments):
    """Return the lines about causes, without the hint about steps."""
    result = run_command("inspect", *arguments, "--trees", 0)
    assert result.exit_code == 0, result.output
    after = result.stdout.partition("longest sample: ")[2].partition("\n")[2]
    return after.partition("\nThese figures take all")[0].strip().splitlines()


def talk(*contents, system=None, **more):
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return {"messages": messages} | more


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_folder(tmp_path_factory.mktemp("tokenizer"), template)
        for name, template in {"chatml": CHATML, "thinking": THINKING}.items()
    }


def causes_of(*arguments):
    return json.loads(run_command("inspect", *arguments, "--json").stdout)["causes"]["found"]


def test_the_same_text_in_other_tokens(tmp_path, folders):
    """Two rows: an answer, and a second turn whose history has the answer in letters."""
    tokenizer = load_tokenizer(folders["chatml"])
    asked, answer, more = (tokenizer.encode_text(text) for text in ("ask: ", "the other answer", " next: five"))
    again = [token for letter in "the other answer" for token in tokenizer.encode_text(letter)]
    assert again != answer
    rows = [
        {"tokens": asked + answer, "loss_mask": [0] * len(asked) + [1] * len(answer)},
        {"tokens": asked + again + more, "loss_mask": [0] * (len(asked) + len(again)) + [1] * len(more)},
    ]
    path = write_rows(tmp_path / "drift.jsonl", rows)
    common = next(at for at, (a, b) in enumerate(zip(rows[0]["tokens"], rows[1]["tokens"], strict=False)) if a != b)
    left = len(rows[0]["tokens"]) - common
    assert said(path, "--tokenizer", folders["chatml"]) == [
        "Samples would share more without:",
        f"- the same text in other tokens, 1 sample, {left} tokens not shared",
        f'  {path}:2 parts from {path}:1 after {common} tokens: both have "the other answer"',
        "  train on the token ids that the engine returned; see docs/howto/token-ids.md",
    ]
    (found,) = causes_of(path, "--tokenizer", folders["chatml"])
    assert (found["cause"], found["samples"], found["is_format"]) == ("retokenised", 1, False)
    assert (found["source"], found["other"], found["common_tokens"]) == (f"{path}:2", f"{path}:1", common)
    assert (found["unshared_tokens"], found["other_words"]) == (left, "the other answer")
    # Without a tokenizer, only turns of a rollout are known to continue each other.
    assert said(path) == ["No cause found in token ids; give --tokenizer to compare their text."]
    turns = [row | {"rollout": 0, "turn": at} for at, row in enumerate(rows)]
    lines = said(write_rows(tmp_path / "turns.jsonl", turns))
    assert lines[1] == f"- other tokens, cause unknown, 1 sample, {left} tokens not shared"
    assert lines[-1] == "  give --tokenizer to see the text"


def test_thinking_that_the_template_drops(tmp_path, folders):
    row = talk("two plus two", "<think>\nsum them\n</think>\n\nfour", "plus one", "<think>\nagain\n</think>\n\nfive")
    path = write_rows(tmp_path / "think.jsonl", [row])
    asked = ("--tokenizer", folders["thinking"], "--expand-turns")
    lines = said(path, *asked)
    assert lines[1].startswith("- the chat format rewrites the history, 1 sample, ")
    assert lines[2].startswith(f"  {path}:1 turn 1 parts from {path}:1 turn 0 after ")
    assert '"<think> sum them </think> four' in lines[2]
    # The same tokens as rows of an engine's rollout may have been changed by anybody.
    samples = read_samples(path, tokenizer=load_tokenizer(folders["thinking"]), expand_turns=True)
    rows = [
        {"tokens": one.tokens.tolist(), "loss_mask": one.loss_mask.tolist(), "rollout": 0, "turn": at}
        for at, one in enumerate(samples)
    ]
    lines = said(write_rows(tmp_path / "rows.jsonl", rows), "--tokenizer", folders["thinking"])
    assert lines[1].startswith("- history rewritten, 1 sample, ")


@pytest.mark.parametrize("tokenizer", ["mistral-v3", "mistral-v3-tekken", "mistral-v7"])
def test_tools_that_the_chat_format_moves(tmp_path, tokenizer):
    row = talk("Can I renew it?", "Yes.", "What do I owe?", "Nothing.", tools=[tool("find_member")])
    lines = said(write_rows(tmp_path / "tools.jsonl", [row]), "--tokenizer", tokenizer, "--expand-turns")
    assert lines[1].startswith("- the chat format rewrites the history, 1 sample, ")


def test_a_template_that_rewrites_the_history(tmp_path):
    folder = make_folder(tmp_path / "tokenizer", REWRITES)
    path = write_rows(tmp_path / "rewritten.jsonl", [called(["c1", "c2", "c3"], "done")])
    lines = said(path, "--tokenizer", folder, "--expand-turns")
    assert lines[1].startswith("- the chat format rewrites the history, 2 samples, ")
    assert '"removed' in lines[2]


@pytest.mark.parametrize(
    ("systems", "words"),
    [
        (("Today is 2025-03-04.", "Today is 2025-03-05."), '"2025-03-05.'),
        (("Answer in English.", "Answer in French."), '"French.'),
    ],
)
@pytest.mark.parametrize("tokenizer", ["mistral-v7", "chatml"])
def test_prompts_that_are_alike_but_for_a_few_words(tmp_path, folders, tokenizer, systems, words):
    questions = ["Can I renew Winter Kitchens?", "What do I owe?", "Please hold The Salt Road."]
    rows = [talk(asked, "Yes.", system=f"{system} {POLICY * 2}") for asked in questions for system in systems]
    lines = said(write_rows(tmp_path / "prompts.jsonl", rows), "--tokenizer", folders.get(tokenizer, tokenizer))
    assert lines[1].startswith("- a few other words ahead of equal ones, 3 samples, ")
    assert any(one in lines[2] for one in (words, f'"{systems[0].split()[-1]}'))


def tool(name):
    card = {"type": "string", "description": "the card number of the member"}
    parameters = {"type": "object", "properties": {"card": card}}
    return {"type": "function", "function": {"name": name, "description": "Serve a member", "parameters": parameters}}


# Older results are removed from the history.
REWRITES = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' and loop.index0 < ns.last %}removed{% else %}{{ m.content or '' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(ids, last):
    messages = [{"role": "user", "content": POLICY}]
    for number, call in enumerate(ids):
        function = {"name": "find_member", "arguments": "{}"}
        messages += [
            {"role": "assistant", "content": f"look {number}", "tool_calls": [{"id": call, "function": function}]},
            {"role": "tool", "tool_call_id": call, "content": f"Member number {number} has the name Ann Lee"},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": last}]}


def test_intended_differences_have_no_cause(tmp_path):
    no_cause = ["No cause found why samples share no more: their continuations differ."]
    answers = write_rows(
        tmp_path / "answers.jsonl", [talk("Hello", text, system=POLICY) for text in ("Yes.", "Yes!", "No")]
    )
    assert said(answers) == no_cause
    questions = [talk(f"What is {n} plus 4? Give the answer in a box at the end.", f"{n + 4}") for n in range(12, 18)]
    assert said(write_rows(tmp_path / "questions.jsonl", questions)) == no_cause
    tokens = write_rows(tmp_path / "tokens.jsonl", [{"tokens": [1, 2, 3]}, {"tokens": [1, 2, 4]}])
    assert said(tokens) == ["No cause found in token ids; give --tokenizer to compare their text."]
    chain = write_rows(tmp_path / "chain.jsonl", [{"tokens": [1, 2, 3]}, {"tokens": [1, 2, 3, 4]}])
    assert said(chain) == []


@pytest.fixture
def turns(tmp_path):
    """Eight prompts of six completions each, one per line, never next to another of the same prompt."""
    rows = [{"tokens": [prompt] * 30 + [50 + leaf] * 3} for leaf in range(6) for prompt in range(8)]
    return write_rows(tmp_path / "turns.jsonl", rows)


def report_of(*arguments):
    result = run_command("inspect", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_better_order_and_larger_steps_are_named_with_their_ratios(turns):
    asked = (turns, "--global-batch-size", 6)
    lines = said(*asked)
    folded, larger = (
        report_of(turns, "--order", "folded", "--global-batch-size", size)["steps"]["fold_ratio"]["mean"]
        for size in (6, 24)
    )
    assert [line.rstrip() for line in lines[:3]] == [
        "Training steps fold more with:",
        f"  --order folded          {folded:.2f}x",
        f"  --global-batch-size 24  {larger:.2f}x  fewer, larger steps, with --order folded",
    ]
    assert [(one["setting"], one["fold_ratio"]) for one in report_of(*asked)["folds_more_with"]] == [
        ("data.order=folded", folded),
        ("batch.global_batch_size=24", larger),
    ]
    plan = run_command("plan", turns, "--max-tokens", "99", "--global-batch-size", "6")
    assert "\n".join(line.rstrip() for line in lines[:3]) in "\n".join(
        line.rstrip() for line in plan.stdout.splitlines()
    )
    assert report_of(turns, "--global-batch-size", 48)["folds_more_with"] == []


def test_expanded_turns_are_named_with_the_ratio_of_their_steps(tmp_path):
    rows = [talk(*[f"{number} go on", "yes"] * 4) for number in range(4)]
    path = write_rows(tmp_path / "talks.jsonl", rows)
    found = report_of(path, "--global-batch-size", 4, "--order", "folded")["folds_more_with"]
    expanded = report_of(path, "--global-batch-size", 4, "--order", "folded", "--expand-turns")
    assert [(one["option"], one["fold_ratio"]) for one in found] == [
        ("--expand-turns", expanded["steps"]["fold_ratio"]["mean"])
    ]


def test_turns_of_a_sample_score_one_turn_each():
    sample = Sample(tokens=[1, 2, 3, 4, 5, 6], loss_mask=[0, 1, 1, 0, 2, 0], merge_key="a")
    turns = expand_sample(sample)
    assert [turn.tokens.tolist() for turn in turns] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert [turn.loss_mask.tolist() for turn in turns] == [[0, 1, 1], [0, 0, 0, 0, 2]]
    assert {turn.merge_key for turn in turns} == {"a"}


@pytest.mark.parametrize("order", ["shuffled", "folded", "file"])
def test_a_step_larger_than_the_file_ends_at_once_with_figures_of_the_file(turns, order):
    command = [sys.executable, "-m", "mcore_prefix_tree", "inspect", str(turns), "--trees", "0", "--order", order]
    done = subprocess.run(
        [*command, "--global-batch-size", "1000000"], capture_output=True, text=True, timeout=60, check=True
    )
    assert " ".join(done.stdout.split()).endswith(
        "A step of 1,000,000 is larger than the 48 samples there are, so these figures are for one step that takes "
        "each of them once."
    )
    (step,) = [line.split() for line in done.stdout.splitlines() if line.startswith("  in training steps")]
    assert step[3:] == ["4.12x", "4.12x-4.12x,", "1", "step", "of", "48", "samples,", order]
    report = report_of(turns, "--global-batch-size", 1_000_000)
    assert report["steps"]["fold_ratio"]["mean"] == report["fold_ratio"]
