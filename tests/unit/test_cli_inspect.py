from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from harness.commands import run_command, write_rows
from harness.oracles import comb

import mcore_prefix_tree.data
from mcore_prefix_tree.cli import drawing
from mcore_prefix_tree.utils import versions

CHAT = [
    [("user", "Hello there"), ("assistant", "Hi, what can I do?"), ("user", "Sing"), ("assistant", "La la la")],
    [("user", "Hello there"), ("assistant", "Hi, what can I do?"), ("user", "Dance"), ("assistant", "I cannot")],
]

WHOLE_FILE = (
    "These figures take all samples as one step. Training steps hold fewer and fold less: give --global-batch-size N "
    "or --model RECIPE to see by how much."
)

NO_CAUSE = "No cause found in token ids; give --tokenizer to compare their text."


def write_tokens(path, rows):
    return write_rows(path, ({"tokens": list(map(int, row))} for row in rows))


@pytest.fixture
def forest(tmp_path):
    """Two trees: a fork with a strict prefix and a duplicate, and a lone sample."""
    return write_tokens(tmp_path / "forest.jsonl", [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [1, 2, 3, 4], [9, 9, 9]])


@pytest.fixture
def chat(tmp_path):
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in CHAT]
    return write_rows(tmp_path / "chat.jsonl", rows)


def test_json_is_one_object_and_nothing_else(forest):
    result = run_command("inspect", forest, "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == {
        "samples": 5,
        "trees": 2,
        "nodes": 5,
        "logical_tokens": 18,
        "physical_tokens": 9,
        "fold_ratio": 2.0,
        "unfolded_pairs": 10 + 15 + 3 + 10 + 6,
        "visible_pairs": 1 + 2 + 3 + 4 + 4 + 5 + 1 + 2 + 3,
        "pair_ratio": 44 / 25,
        "steps": None,
        "folds_more_with": [],
        "causes": {"complete": True, "found": []},
        "supervised_tokens": 13,
        "predictors": 6,
        "predictor_ratio": 13 / 6,
        "expected_speedup": None,
        "skipped": 0,
        "excluded": 0,
        "not_read": {},
        "skipped_by_kind": {},
        "longest_path": 5,
        "deepest_node": 3,
        "segments": 4,
        "segment_levels": 2,
        "segment_states": 2,
        "longest_sample": f"{forest}:2",
        "tokenizer": None,
        "largest_trees": [
            {"samples": 4, "nodes": 4, "logical_tokens": 15, "physical_tokens": 6},
            {"samples": 1, "nodes": 1, "logical_tokens": 3, "physical_tokens": 3},
        ],
    }


def test_drawing_matches_the_report(forest):
    result = run_command("inspect", forest)
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    counts = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1] for line in lines[6:15]}
    assert counts == {
        "samples": "5",
        "logical tokens": "18",
        "physical tokens": "9",
        "fold ratio": "2.00x",
        "visible-pair ratio": "1.76x",
        "predictor ratio": "2.17x",
        "expected speed-up": "1.76x-2.17x",
        "trees": "2",
        "nodes": "5",
    }
    assert lines[15] == f"longest sample: {forest}:2"
    assert lines[:6] == [
        "3 tokens in a chain of 2 nodes, 4 samples  1 2 3",
        "├── 1 token, 2 samples  4",
        "└── 2 tokens, 1 sample  5 6",
        "",
        "3 tokens, 1 sample  9 9 9",
        "",
    ]
    assert " ".join(lines[16:]).strip() == f"{NO_CAUSE}  {WHOLE_FILE}"
    assert max(map(len, (*lines[:15], *lines[16:]))) <= 80


def test_a_model_has_an_expected_speedup(chat, tmp_path):
    """By hand: a layer of 8 x 8 x (4 + 3 x 4) weights, two heads of 4 channels, a vocabulary of 128."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "data: {path: unread.jsonl, expand_turns: true, tokenizer: mistral-v3}\n"
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, vocab_size: 128}\n"
        "batch: {global_batch_size: 4, max_tokens: 64}\ntrain_iters: 1\n"
    )
    report = json.loads(run_command("inspect", chat, "--json", "--model", path).stdout)
    assert (report["samples"], report["tokenizer"]) == (4, "mistral-v3"), "read as the recipe reads its own"
    expected = report["expected_speedup"]
    ratios = {part: expected[part]["ratio"] for part in ("body", "attention", "head")}
    assert ratios == {
        "body": report["fold_ratio"],
        "attention": report["pair_ratio"],
        "head": report["predictor_ratio"],
    }
    body, attention, head = (6 * n for n in (8 * 8 * 16, 8 * 2 * 3.5 / 3, 8 * 128))
    unfolded, folded = (
        body * report[tokens] + attention * report[pairs] + head * report[scored]
        for tokens, pairs, scored in (
            ("logical_tokens", "unfolded_pairs", "supervised_tokens"),
            ("physical_tokens", "visible_pairs", "predictors"),
        )
    )
    assert expected["ratio"] == pytest.approx(unfolded / folded)
    lines = run_command("inspect", chat, "--model", path).stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("expected")]
    assert lines[at].split()[2] == f"{unfolded / folded:.2f}x"
    assert [line.split()[:2] for line in lines[at + 1 : at + 4]] == [
        ["body", f"{report['fold_ratio']:.2f}x"],
        ["attention", f"{report['pair_ratio']:.2f}x"],
        ["head", f"{report['predictor_ratio']:.2f}x"],
    ]


def test_trees_option_limits_the_drawings_and_counts_the_rest(forest):
    assert "9 9 9" not in run_command("inspect", forest, "--trees", 1).stdout
    assert "… 1 more tree\n" in run_command("inspect", forest, "--trees", 1).stdout
    assert "├" not in run_command("inspect", forest, "--trees", 0).stdout
    assert len(json.loads(run_command("inspect", forest, "--trees", 1, "--json").stdout)["largest_trees"]) == 1
    assert run_command("inspect", forest, "--trees", -1).exit_code == 2


def test_large_fan_outs_are_cut_and_counted(tmp_path):
    path = write_tokens(tmp_path / "star.jsonl", [[7, *[leaf] * (leaf + 1)] for leaf in range(40)])
    lines = run_command("inspect", path).stdout.splitlines()
    branches = [line for line in lines if re.match(r"[├└]", line)]
    assert len(branches) == drawing.MAX_BRANCHES + 1
    left_out = 40 - drawing.MAX_BRANCHES
    tokens = sum(range(1, left_out + 1))  # the largest are drawn
    assert branches[-1] == f"└── … {left_out} more branches, {tokens:,} tokens"


def test_runs_of_branches_of_one_token_are_one_line(tmp_path):
    path = write_tokens(tmp_path / "ends.jsonl", [[1, 2], [1, 3, 3], *([1, leaf] for leaf in range(4, 9))])
    drawn = run_command("inspect", path).stdout.partition("\n\n")[0].splitlines()
    assert [line.rstrip() for line in drawn] == [
        "1 token, 7 samples  1",
        "├── 2 tokens, 1 sample  3 3",
        "└── … 6 more branches, 6 tokens",
    ]


def test_deep_trees_are_cut_and_counted(tmp_path):
    path = write_tokens(tmp_path / "comb.jsonl", [sample.tokens for sample in comb(300)])
    lines = run_command("inspect", path).stdout.partition("\nsamples ")[0].splitlines()
    assert max(re.search(r"\d|…|$", line).start() for line in lines) == 4 * drawing.MAX_LEVELS
    assert any("… 2 branches, " in line for line in lines)
    drawn = sum(int(found.replace(",", "")) for line in lines for found in re.findall(r"([\d,]+) tokens?", line))
    assert drawn == 600  # samples cut from the drawing are counted at the cut: none is lost


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [80, 200])
def test_drawings_fit_the_terminal(tmp_path, encoding, width):
    path = write_tokens(tmp_path / "wide.jsonl", [[*range(2000, 2040), end, *range(40)] for end in range(9)])
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": str(width), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mcore_prefix_tree", "inspect", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    lines = done.stdout.decode(encoding).splitlines()
    assert done.stderr == b""
    assert max(len(line) for line in lines if not line.startswith("longest sample")) <= width
    assert any(line.startswith("+-- 41 tokens" if encoding == "ascii" else "├── 41 tokens") for line in lines)


def test_long_chains_are_one_line(tmp_path):
    path = write_tokens(tmp_path / "turns.jsonl", [range(length) for length in range(5, 105, 5)])
    drawn = run_command("inspect", path).stdout.partition("\n\n")[0].splitlines()
    assert len(drawn) == 1
    assert drawn[0].startswith("100 tokens in a chain of 20 nodes, 20 samples  0 1 2 3")


def test_chat_is_encoded_with_the_default_tokenizer(chat):
    whole, turns = (
        json.loads(run_command("inspect", chat, "--json", *more).stdout) for more in ([], ["--expand-turns"])
    )
    assert whole["tokenizer"] == turns["tokenizer"] == "mistral-v7"
    assert (whole["samples"], turns["samples"]) == (2, 4)
    assert turns["physical_tokens"] == whole["physical_tokens"]
    assert turns["logical_tokens"] > whole["logical_tokens"]
    assert turns["longest_sample"].endswith(" turn 1")


def test_text_is_shown_if_the_tokenizer_can_decode(forest, monkeypatch):
    class Decoding:
        name = "letters"
        vocab_size = 100

        def decode(self, token_ids):
            return " ".join(f"[bold]w{token}\x1b[2J\n" for token in token_ids)

    monkeypatch.setattr(mcore_prefix_tree.data, "load_tokenizer", lambda name, kwargs: Decoding())
    output = run_command("inspect", forest, "--tokenizer", "letters").stdout
    assert "[bold]w1 [2J [bold]w2 [2J [bold]w3" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(("tokenizer", "beyond"), [("mistral-v7", 32768), ("mistral-v3-tekken", 131072)])
def test_ids_are_shown_if_the_tokenizer_lacks_them(tmp_path, tokenizer, beyond):
    path = write_tokens(tmp_path / "beyond.jsonl", [[1, 2, last, last] for last in (1100, beyond, 2**31 - 1)])
    result = run_command("inspect", path, "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.output
    root, *branches = [line.rstrip() for line in result.stdout.partition("\n\n")[0].splitlines()]
    assert "  1 2" not in root
    assert "1100" not in branches[0]
    assert [line.rpartition("  ")[2] for line in branches[1:]] == [f"{beyond} {beyond}", f"{2**31 - 1} {2**31 - 1}"]


def test_standard_input():
    result = run_command("inspect", "-", "--json", stdin='{"tokens": [1, 2]}\n{"tokens": [1, 3]}\n')
    assert json.loads(result.stdout)["physical_tokens"] == 3
    assert json.loads(result.stdout)["longest_sample"] == "<stdin>:1"


TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        (None, [], "no such file"),
        ("", [], "there are no records"),
        ('{"tokens": [1]}\n{"tokens": [1, -5]}', [], ":2: field 'tokens' has -5 at index 1"),
        ('{"tokens": [1]}', ["--tokenizer", "nonsense"], "tokenizer 'nonsense' is neither"),
        ("not json", [], ":1: not valid JSON"),
        (TALK, ["--chat-template-kwargs", "{"],
         "error: --chat-template-kwargs: '{' is not JSON (Expecting property name enclosed in double quotes"),
        (TALK, ["--chat-template-kwargs", "[1]"], "error: --chat-template-kwargs: '[1]' is not a JSON object\n"),
        (TALK, ["--chat-template-kwargs", '{"enable_thinking": false}'],
         "error: chat_template_kwargs (enable_thinking) are for the chat template of a "),
    ],
)  # fmt: skip
def test_errors_are_one_sentence_and_exit_code_2(tmp_path, content, arguments, says):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    result = run_command("inspect", path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied", "secret.jsonl"), "error: secret.jsonl: Permission denied\n"),
        (OSError("the disk\nis full"), "error: the disk is full\n"),
        (NotImplementedError("not yet"), "error: not yet\n"),
        (ImportError("pip install it"), "error: pip install it\n"),
        (ValueError(), "error: ValueError\n"),
        (KeyError("ours"), None),  # a bug keeps its traceback
    ],
)
def test_the_boundary_shared_by_all_commands(forest, monkeypatch, error, says):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(mcore_prefix_tree.data, "iter_sample_groups", fail)
    result = run_command("inspect", forest)
    if says is None:
        assert (result.exit_code, result.exception) == (1, error)
    else:
        assert (result.exit_code, result.stderr, result.stdout) == (2, says, "")


COMMAND = [sys.executable, "-m", "mcore_prefix_tree", "inspect"]


def test_a_real_control_c_while_reading():
    with subprocess.Popen(
        [*COMMAND, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b'{"tokens": [1]}\n' * 20_000)  # more than a pipe holds: it is reading by now
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == process.stdout.read() == b""


def test_a_bad_line_is_skipped_and_counted(forest):
    forest.write_text(forest.read_text() + "{}\n")
    assert run_command("inspect", forest, "--json").exit_code == 2
    result = run_command("inspect", forest, "--json", "--on-error", "skip")
    assert json.loads(result.stdout)["samples"] == 5
    assert json.loads(result.stdout)["skipped"] == 1
    assert json.loads(result.stdout)["skipped_by_kind"] == {"malformed": 1}
    assert result.stderr.startswith(f"skipped 1 bad sample (1 malformed): {forest}:6: has none")


def test_the_versions_that_a_report_needs():
    result = run_command("--version")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["mcore-prefix-tree", "megatron-core", "torch"]
    assert f"torch {importlib.metadata.version('torch')}" in result.stdout


def test_a_checkout_on_the_path_has_no_version(monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)
    result = run_command("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("mcore-prefix-tree (not installed)\n")


@pytest.mark.parametrize(
    ("encoding", "name", "words", "more"),
    [
        ("ascii", "r?sume.jsonl:1", "cafe and ? go on", "..."),
        ("latin-1", "r?sum\xe9.jsonl:1", "caf\xe9 and ? go on", "..."),
        ("utf-8", "r?sum\xe9.jsonl:1", "caf\xe9 and \u2603 go on", "\u2026"),
    ],
)
def test_a_terminal_may_have_any_encoding(tmp_path, encoding, name, words, more):
    """Characters that it lacks are escaped with those that it has; a file name may not be valid text."""
    talk = [("user", "caf\xe9 and \u2603 go on " + "and on " * 20), ("assistant", "Yes")]
    file = tmp_path / "r\udce9sum\xe9.jsonl"
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) + "\n")
    done = subprocess.run(
        [*COMMAND, str(file)], capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown = done.stdout.decode(encoding)
    for part in (name, words, more):
        assert part in shown
