"""Links of all pages lead somewhere; the commands, options and keys that they name exist."""

from __future__ import annotations

import argparse
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from pages import PAGES, ROOT, anchors_of, commands_of, inline_of, links_of, name_of

from mcore_prefix_tree.arguments.flags import add_argument_group
from mcore_prefix_tree.cli.main import app
from mcore_prefix_tree.settings import Recipe, load_recipe
from mcore_prefix_tree.utils.gone import GONE

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
COMMANDS: Any = typer.main.get_command(app)
MEGATRON = {
    option
    for action in add_argument_group(argparse.ArgumentParser())._actions
    for option in action.option_strings
    if option.startswith("--prefix-tree")
}
SECTIONS = "|".join(name for name, kind in get_type_hints(Recipe).items() if is_dataclass(kind))


def command_of(words: list[str]) -> tuple[Any, list[str]] | None:
    """Return one of our commands and its arguments; None for another program."""
    module = next((at for at in range(1, len(words)) if words[at - 1 : at + 1] == ["-m", "mcore_prefix_tree"]), None)
    if words[0] != "mcore-prefix-tree" and module is None:
        return None
    words = words[(module or 0) + 1 :]
    command = COMMANDS
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{words[0]} is no command"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options_of(command: Any) -> set[str]:
    return {"--help", *(option for one in command.params for option in (*one.opts, *one.secondary_opts))}


def check_key(key: str) -> None:
    """Check that a recipe has such a key."""
    kind: Any = Recipe
    for name in key.split("."):
        if not is_dataclass(kind):
            return  # for example objective.options, whose keys are the objective's
        hints = get_type_hints(kind)
        assert name in hints, f"{key} is no key of a recipe"
        kind = next((one for one in get_args(hints[name]) if is_dataclass(one)), hints[name])


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links_of(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert target.is_relative_to(ROOT), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{path}#{anchor}"


@each_page
def test_commands_are_accepted(page: Path) -> None:
    for words in commands_of(page):
        found = command_of(words)
        if found is not None:
            command, given = found
            overrides = command.make_context("", list(given)).params.get("overrides") or []
            for override in overrides:
                check_key(override.partition("=")[0])
            recipe = given[0] if given else ""
            if recipe.startswith("recipes/") and recipe.endswith(".yaml") and "--hf" not in given:
                load_recipe(ROOT / recipe, overrides)
        for word in words:
            if word.startswith("--prefix-tree"):
                assert word.partition("=")[0] in MEGATRON, word
            if re.fullmatch(r"(scripts|tests|recipes|examples)/[\w./-]+", word):
                assert (ROOT / word).exists(), word


@each_page
def test_options_and_keys_in_the_text_exist(page: Path) -> None:
    for code in inline_of(page):
        words = code.split()
        found = command_of(words) if words[0] == "mcore-prefix-tree" else None
        if found is not None:
            command, given = found
            assert {word for word in given if word.startswith("--")} <= options_of(command), code
        for word in words:
            if word.startswith("--prefix-tree"):
                assert word.partition("=")[0] in MEGATRON, code
        key = re.fullmatch(rf"((?:{SECTIONS})\.[a-z_.]+)(?:[=:].*)?", code)
        if key and key[1] not in GONE and not key[1].endswith((".py", ".safetensors", ".weight")):
            check_key(key[1])
