"""How doors spell settings: one key in the package, one table per door, and arguments that are made of fields."""

from __future__ import annotations

import argparse
import ast
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Literal

import pytest
from pydantic.dataclasses import dataclass

import mcore_prefix_tree
from mcore_prefix_tree.arguments import flags
from mcore_prefix_tree.arguments.flags import FLAGS, MEGATRON, SPELLINGS, Flag, add_argument_group, add_flags
from mcore_prefix_tree.settings.section import find_setting
from mcore_prefix_tree.settings.sections import BatchConfig, Recipe
from mcore_prefix_tree.utils.errors import Mistakes, spell, spelled

PACKAGE = Path(mcore_prefix_tree.__file__).parent
# Only this entry point may spell settings as Megatron-LM's arguments.
DOOR = ("arguments", "mcore/megatron_lm", "pretrain_gpt.py", "pretrain_hybrid.py", "train_rl.py")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.set_defaults(dataloader_type=None)
    return add_argument_group(parser).parse_args(words)


def test_only_its_door_spells_arguments_of_megatron_lm() -> None:
    offenders = []
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        if place.startswith(DOOR):
            continue
        texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
        offenders += [f"{place}: {text}" for text in texts if isinstance(text, str) and "--prefix-tree-" in text]
    assert offenders == []


@pytest.mark.parametrize("key", [flag.key for flag in FLAGS if not flag.key.startswith("score.")] + [*MEGATRON])
def test_the_table_has_keys_of_recipes(key: str) -> None:
    assert find_setting(Recipe, key).text or key in MEGATRON


@pytest.mark.parametrize("flag", FLAGS, ids=[flag.key for flag in FLAGS])
def test_defaults_are_those_of_the_settings(flag: Flag) -> None:
    expected = None if flag.setting.default is MISSING else flag.setting.default
    assert vars(parse())[flag.dest] == expected


def test_an_option_of_both_doors_is_a_field_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new setting is a field of its section and a row of the table; parser, help and recipe follow."""

    @dataclass(frozen=True, kw_only=True)
    class Batch(BatchConfig):
        """Size of a step.

        Attributes:
            cut: where trees are cut, ``between_samples`` or ``along_paths``; see ``batch.max_tokens``.
            keep_order: whether micro-batches keep the order of the samples.
        """

        cut: Literal["between_samples", "along_paths"] = "between_samples"
        keep_order: bool = True

    monkeypatch.setattr(flags, "Recipe", type("Recipe", (), {"__annotations__": {"batch": Batch}}))
    rows = (Flag("batch.cut"), Flag("batch.keep_order"))
    monkeypatch.setattr(flags, "_DESTS", {row.key: row.dest for row in rows})
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group("prefix-tree"), rows)
    args = parser.parse_args(["--prefix-tree-cut", "along_paths", "--prefix-tree-no-keep-order"])
    values = flags.read_section(args, "batch")
    assert replace(Batch(max_tokens=8, global_batch_size=2), **values) == Batch(
        max_tokens=8, global_batch_size=2, cut="along_paths", keep_order=False
    )
    helps = {action.dest: action.help for action in parser._actions}
    assert helps["prefix_tree_cut"] == (
        "Where trees are cut, between_samples or along_paths; see --prefix-tree-max-tokens. Default: between_samples."
    )
    assert helps["prefix_tree_keep_order"] == "Turn off: whether micro-batches keep the order of the samples."


@pytest.mark.parametrize(
    ("sentence", "printed"),
    [
        ("raise batch.max_tokens=8 or", "raise --prefix-tree-max-tokens=8 or"),
        ("set fused_head=false", "set --prefix-tree-no-fused-head"),
        ("objective.options.kl: no such key", "--prefix-tree-objective-options.kl: no such key"),
        ("(data.streaming=false)", "(no --prefix-tree-streaming)"),
        (
            "objective.teacher_recipe=t.yaml: its data.tokenizer is missing",
            "--prefix-tree-teacher=t.yaml: its data.tokenizer is missing",
        ),
        ("runs/data.path: is a folder", "runs/data.path: is a folder"),
        ("batch.max_tokens_of_mine", "batch.max_tokens_of_mine"),
        (
            "`mcore-prefix-tree score --teacher-top-k K` of the teacher writes it",
            "`--prefix-tree-score FILE --prefix-tree-score-teacher-top-k K` of the teacher writes it",
        ),
    ],
)
def test_a_sentence_is_spelled_as_the_door_spells_settings(sentence: str, printed: str) -> None:
    assert spell(sentence, SPELLINGS) == printed
    assert spell(sentence, {}) == sentence


def test_an_error_keeps_its_type_and_place() -> None:
    with pytest.raises(ZeroDivisionError), spelled(SPELLINGS):
        raise ZeroDivisionError("batch.max_tokens")
    with pytest.raises(KeyError), spelled(SPELLINGS):
        raise KeyError("batch.max_tokens")
    with pytest.raises(FileNotFoundError, match="No such file"), spelled(SPELLINGS):
        Path("batch.max_tokens").read_text()
    with pytest.raises(ValueError, match=r"^raise --prefix-tree-max-tokens$"), spelled(SPELLINGS):
        raise ValueError("raise batch.max_tokens")


def test_several_mistakes_are_one_sentence_and_one_keeps_its_type() -> None:
    def fail(error: Exception) -> None:
        raise error

    mistakes = Mistakes()
    mistakes.report()
    assert not mistakes.check(fail, FileNotFoundError(2, "No such file or directory", "a.jsonl"))
    with pytest.raises(FileNotFoundError):
        mistakes.report()
    assert not mistakes.check(fail, ValueError("b is wrong"))
    assert not mistakes.check(fail, ValueError("b is wrong"))
    assert mistakes.check(lambda: None)
    with pytest.raises(ValueError, match=r"^a\.jsonl: No such file or directory; b is wrong$"):
        mistakes.report()
    with pytest.raises(ZeroDivisionError):
        mistakes.check(fail, ZeroDivisionError())
