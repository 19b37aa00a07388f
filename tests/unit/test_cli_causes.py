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


@pytest.fixture
def drift(tmp_path, folders):
    """Two rows: an answer, and a second turn whose history has the answer in letters."""
    tokenizer = load_tokenizer(folders["chatml"])
    asked, answer, more = (tokenizer.encode_text(text) for text in ("ask: ", "the other answer", " next: five"))
    again = [token for letter in "the other answer" for token in tokenizer.encode_text(letter)]
    assert again != answer
    rows = [
        {"tokens": asked + answer, "loss_mask": [0] * len(asked) + [1] * len(answer)},
        {"tokens": asked + again + more, "loss_mask": [0] * (len(asked) + len(again)) + [1] * len(more)},
    ]
    same = {"tokens": asked + answer + more}
    return write_rows(tmp_path / "drift.jsonl", rows), rows, len(asked) + len(answer) + len(same["tokens"]), same


def test_the_same_text_in_other_tokens(drift, folders):
    path, rows, logical, same = drift
    now = sum(len(row["tokens"]) for row in rows)
    common = next(at for at, (a, b) in enumerate(zip(rows[0]["tokens"], rows[1]["tokens"], strict=False)) if a != b)
    lines = said(path, "--tokenizer", folders["chatml"])
    assert lines == [
        "Samples would share more without (fold ratio now, and if mended):",
        f"- the same text in other tokens, 1 sample: {now / (now - common):.2f}x, {logical / len(same['tokens']):.2f}x",
        f"  {path}:2 parts from {path}:1 after {common} tokens: both have "
        f'"{load_tokenizer(folders["chatml"]).decode(rows[0]["tokens"][common:]).strip()}"',
        "  train on the token ids that the engine returned; see docs/howto/token-ids.md",
    ]
    report = json.loads(run_command("inspect", path, "--tokenizer", folders["chatml"], "--json").stdout)["causes"]
    (found,) = report["found"]
    assert report["complete"]
    assert (found["cause"], found["samples"], found["is_upper_bound"]) == ("retokenised", 1, False)
    assert (found["source"], found["other"], found["common_tokens"]) == (f"{path}:2", f"{path}:1", common)
    assert found["physical_tokens"] == len(same["tokens"])


def test_without_a_tokenizer_the_text_is_asked_for(drift, folders):
    path = drift[0]
    lines = said(path)
    assert lines[1].startswith("- other tokens, cause unknown, 1 sample: 1.12x, at most ")
    assert lines[-1] == "  give --tokenizer to see the text"
    least, most = (
        json.loads(run_command("inspect", path, "--json", *more).stdout)["causes"]["found"][0]["fold_ratio"]
        for more in (["--tokenizer", folders["chatml"]], [])
    )
    assert most >= least


def test_thinking_that_the_template_drops(tmp_path, folders):
    path = write_rows(
        tmp_path / "think.jsonl",
        [talk("two plus two", "<think>\nsum them\n</think>\n\nfour", "plus one", "<think>\nagain\n</think>\n\nfive")],
    )
    asked = ("--tokenizer", folders["thinking"], "--expand-turns")
    lines = said(path, *asked)
    assert lines[1].startswith("- thinking dropped from earlier turns, 1 sample: ")
    assert lines[2].startswith(f"  {path}:1 turn 1 parts from {path}:1 turn 0 after ")
    assert "<think> sum them </think> four" in lines[2]
    samples = read_samples(path, tokenizer=load_tokenizer(folders["thinking"]), expand_turns=True)
    report = json.loads(run_command("inspect", path, *asked, "--json").stdout)
    (found,) = report["causes"]["found"]
    # The second turn continues the first, so only the new ones of its tokens are computed for it.
    kept = load_tokenizer(folders["thinking"]).decode(samples[0].tokens.tolist())
    assert kept.endswith("four<|im_end|>")
    assert found["physical_tokens"] < report["physical_tokens"]


@pytest.mark.parametrize(
    ("systems", "title", "words"),
    [
        (("Today is 2025-03-04.", "Today is 2025-03-05."), "another date in the prompt", '"2025-03-04."'),
        (("Session 4f1c27aa9b03.", "Session 8ce1b07d52ef."), "another id in the prompt", '"4f1c27aa9b03."'),
        (("You have 12 credits.", "You have 310 credits."), "another number in the prompt", '"12"'),
        (("Answer in English.", "Answer in French."), "another system prompt", '"English."'),
    ],
)
@pytest.mark.parametrize("tokenizer", ["mistral-v7", "chatml"])
def test_prompts_that_are_alike_but_for_a_few_words(tmp_path, folders, tokenizer, systems, title, words):
    questions = ["Can I renew Winter Kitchens?", "What do I owe?", "Please hold The Salt Road."]
    rows = [talk(asked, "Yes.", system=f"{system} {POLICY}") for asked in questions for system in systems]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    named = folders.get(tokenizer, tokenizer)
    lines = said(path, "--tokenizer", named)
    assert lines[1].startswith(f"- {title}, 3 samples: ")
    assert words in lines[2]
    (found,) = json.loads(run_command("inspect", path, "--tokenizer", named, "--json").stdout)["causes"]["found"]
    same = [talk(asked, "Yes.", system=f"{system} {POLICY}") for asked in questions for system in systems[:1] * 2]
    mended = json.loads(
        run_command("inspect", write_rows(tmp_path / "same.jsonl", same), "--tokenizer", named, "--json").stdout
    )
    assert abs(found["physical_tokens"] - mended["physical_tokens"]) <= 12  # the other words may be longer


def tool(name):
    card = {"type": "string", "description": "the card number of the member"}
    parameters = {"type": "object", "properties": {"card": card}}
    return {"type": "function", "function": {"name": name, "description": "Serve a member", "parameters": parameters}}


def test_other_tools(tmp_path):
    names = ["find_member", "renew_loan", "place_hold"]
    rows = [
        talk(asked, "Yes.", system=POLICY, tools=[tool(name) for name in chosen])
        for asked in ("Can I renew it?", "What do I owe?")
        for chosen in (names, [*names[:1], "list_books", *names[1:]])
    ]
    lines = said(write_rows(tmp_path / "tools.jsonl", rows), "--tokenizer", "mistral-v7")
    assert lines[1].startswith("- other tools, 2 samples: ")
    assert "list_books" in lines[2]


IDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '{"id": "{{ c.id }}", "name": "{{ c.function.name }}"}{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


@pytest.mark.parametrize("ids", [["call_Ab12Cd34Ef56Gh", "call_Zz98Yy76Xx54Ww"], ["a1B2c3D4e", "Z9y8X7w6V"]])
def test_random_ids_of_calls(tmp_path, ids):
    folder = make_folder(tmp_path / "tokenizer", IDS)
    path = write_rows(tmp_path / "calls.jsonl", [called([call], last) for call, last in zip(ids, "AB", strict=True)])
    lines = said(path, "--tokenizer", folder, "--expand-turns")
    assert lines[1].startswith("- random tool-call ids, 2 samples: ")
    assert lines[3] == "  number the calls of a conversation instead of drawing ids"
    (found,) = json.loads(run_command("inspect", path, "--tokenizer", folder, "--expand-turns", "--json").stdout)[
        "causes"
    ]["found"]
    same = write_rows(tmp_path / "same.jsonl", [called(ids[:1], last) for last in "AB"])
    mended = json.loads(run_command("inspect", same, "--tokenizer", folder, "--expand-turns", "--json").stdout)
    assert abs(found["physical_tokens"] - mended["physical_tokens"]) <= 12


def test_a_template_that_rewrites_the_history(tmp_path):
    folder = make_folder(tmp_path / "tokenizer", REWRITES)
    path = write_rows(tmp_path / "rewritten.jsonl", [called(["c1", "c2", "c3"], "done")])
    lines = said(path, "--tokenizer", folder, "--expand-turns")
    assert lines[1].startswith("- history rewritten, 2 samples: ")
    assert '"removed' in lines[2]


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
    assert step[3:] == ["4.12x", "4.12x", "to", "4.12x,", "1", "step", "of", "48", "samples,", order]
    report = report_of(turns, "--global-batch-size", 1_000_000)
    assert report["steps"]["fold_ratio"]["mean"] == report["fold_ratio"]
