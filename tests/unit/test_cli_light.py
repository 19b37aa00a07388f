"""Commands that load neither torch nor Megatron: help, completion, samples, and mistakes in a recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from harness.commands import SLOW_PACKAGES, run_command, run_process, write_rows

from mcore_prefix_tree.cli.main import app

# Runs commands of the command line one after the other, in one interpreter, and prints how each ended.
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from mcore_prefix_tree.cli.main import app
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"code": result.exit_code, "stderr": result.stderr, "loaded": loaded}))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    lines = [{"tokens": [1, 2, token], "group": token // 2, "reward": token} for token in range(4, 10)]
    data = write_rows(tmp_path / "data.jsonl", lines)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{path: {data}}}\n"
        "model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 16}\n"
        "batch: {global_batch_size: 2, max_tokens: 64}\n"
        "objective: {name: grpo}\ntrain_iters: 4\n"
    )
    return path


def ended(*commands: list[str]) -> list[dict[str, object]]:
    """Exit of each command, and the modules loaded by then."""
    result = run_process([sys.executable, "-c", PROGRAM], input=json.dumps(commands), code=0)
    return [json.loads(line) for line in result.stdout.splitlines()]


# An override that makes a mistake, and the start of the sentence.
MISTAKES = {
    "train_itres=3": "recipe {recipe}: train_itres: there is no such key (given 3), did you mean train_iters?",
    "objective.name=grop": "recipe {recipe}: objective.name: there is no objective 'grop'; there are ",
    "objective.options.kl_coeff=1": "recipe {recipe}: objective.options.kl_coeff: grpo has no such option; it has ",
    "objective.options.clip_eps_high=-1": "recipe {recipe}: objective.options.clip_eps_high: input should be ",
    "objective.teacher_recipe=teacher.yaml": "recipe {recipe}: objective.teacher_recipe=teacher.yaml: only ",
    "attention_backend=flash": "recipe {recipe}: attention backend 'flash' does not exist; choose one of ",
    "data.path=nowhere.jsonl": "nowhere.jsonl: no such file in ",
    "data.tokenizer=mistral-v77": "tokenizer 'mistral-v77' is neither a folder nor one of ",
    "optimizer.lr_warmup_steps=4": "optimizer.lr_warmup_steps=4 must be below train_iters=4; lower it, or set ",
    "optimizer.min_lr=1": "optimizer.min_lr=1.0 is above optimizer.lr=0.001",
    "model.num_query_groups=3": "recipe {recipe}: model.num_attention_heads=2 is not a multiple of ",
    "model.kv_channels=1": "recipe {recipe}: rotary embeddings turn pairs of channels, ",
}


def test_mistakes_in_a_recipe_are_found_before_torch_is_loaded(recipe: Path) -> None:
    for mistake, found in zip(
        MISTAKES.items(), ended(*(["train", str(recipe), wrong] for wrong in MISTAKES)), strict=True
    ):
        sentence = mistake[1].format(recipe=recipe)
        assert (found["code"], str(found["stderr"]).startswith(f"error: {sentence}")) == (2, True), found["stderr"]
        assert SLOW_PACKAGES.isdisjoint(found["loaded"]), mistake[0]  # type: ignore[arg-type]


def test_folders_that_are_missing_or_exist_are_found_before_torch_is_loaded(recipe: Path) -> None:
    nowhere, here = recipe.parent / "nowhere", recipe.parent
    no_checkpoint = f"{nowhere} holds no checkpoint; train first, or name the folder of a run that did"
    scored = ["--output", str(here / "scored.jsonl")]
    mistakes = {
        ("score", str(recipe), f"checkpoint.save={nowhere}", *scored): no_checkpoint,
        ("score", str(recipe), *scored): "scoring needs checkpoint.save, the folder of the checkpoints to score with",
        ("export", str(recipe), "out"): "export needs model.hf, whose format it writes; set it; export needs "
        "checkpoint.save; set it",
        ("recipes", str(recipe)): f"{recipe} is not a folder; name one, which may be new",
        ("train", str(here)): f"recipe {here} is a folder; name a YAML file in it",
    }
    for (command, says), found in zip(mistakes.items(), ended(*map(list, mistakes)), strict=True):
        assert (found["code"], found["stderr"]) == (2, f"error: {says}\n"), command
        assert SLOW_PACKAGES.isdisjoint(found["loaded"]), command  # type: ignore[arg-type]


def test_samples_are_folded_and_planned_without_torch(recipe: Path) -> None:
    data = str(recipe.parent / "data.jsonl")
    commands = (
        ["inspect", data],
        ["inspect", data, "--model", str(recipe)],
        ["plan", data, "--max-tokens", "8"],
        ["plan", data, "--model", str(recipe), "--dp", "2"],
    )
    for command, found in zip(commands, ended(*commands), strict=True):
        assert found["code"] == 0, found["stderr"]
        assert SLOW_PACKAGES.isdisjoint(found["loaded"]), command  # type: ignore[arg-type]


def all_commands(group: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, command in getattr(group, "commands", {}).items():
        found += all_commands(command, (*path, name))
    return found


COMMANDS = all_commands(typer.main.get_command(app))


def test_every_command_has_a_short_option_for_help() -> None:
    assert {(), ("train",), ("bench", "step"), ("xtoken", "trim")} <= set(COMMANDS)
    for command in COMMANDS:
        result = run_command(*command, "-h", code=0)
        assert result.stdout == run_command(*command, "--help").stdout
        assert " ".join(("Usage: root", *command)) in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("ins", ["inspect"]), ("inspect --expand", ["--expand-turns"]), ("inspect --order fo", ["folded"])],
)
def test_shells_complete_commands_options_and_values(typed: str, offered: list[str]) -> None:
    words = f"mcore-prefix-tree {typed}"
    environment = {
        **os.environ,
        "_MCORE_PREFIX_TREE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = subprocess.run(
        [sys.executable, "-m", "mcore_prefix_tree"], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == offered
