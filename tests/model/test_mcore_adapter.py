"""The forms that Megatron-LM's ``pretrain`` has had, with a fake in its place; tests/upstream runs the real ones."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import megatron
import pytest

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.mcore.megatron_lm.command_line import add_prefix_tree_args

ADAPTER = "mcore_prefix_tree.mcore.megatron_lm.pretrain_forms"
Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import the adapter where ``megatron.training`` has the ``pretrain`` that is given."""

    def load(pretrain: Any) -> Any:
        modules = {name: ModuleType(name) for name in ("megatron.training", "megatron.training.arguments")}
        utils = modules["megatron.training.argument_utils"] = ModuleType("megatron.training.argument_utils")
        package = modules["megatron.training"]
        package.pretrain, package.get_args, package.training = pretrain, None, None  # type: ignore[attr-defined]
        package.__file__ = "checkout/megatron/training/__init__.py"
        arguments = modules["megatron.training.arguments"]
        arguments.parse_args = parse_args  # type: ignore[attr-defined]
        arguments.parse_and_validate_args = lambda **settings: settings  # type: ignore[attr-defined]
        utils.pretrain_cfg_container_from_args = lambda args: ("container of", args)  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        # Where another test has imported the real one.
        monkeypatch.setattr(megatron, "training", package, raising=False)
        sys.modules.pop(ADAPTER, None)
        return importlib.import_module(ADAPTER)

    yield load
    sys.modules.pop(ADAPTER, None)


def parse_args(extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser]) -> argparse.Namespace:
    """Parse the command line as Megatron-LM does."""
    return extra_args_provider(argparse.ArgumentParser()).parse_args()


def recorder(signature: str) -> tuple[Any, dict[str, Any]]:
    """A ``pretrain`` with these parameters, and the arguments of its calls."""
    seen: dict[str, Any] = {}
    scope: dict[str, Any] = {"seen": seen}
    exec(f"def pretrain({signature}): seen.update(locals())", scope)
    return scope["pretrain"], seen


CORE_016 = (
    "train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, "
    "process_non_loss_data_func=None, extra_args_provider=None, args_defaults={}, store=None"
)
CORE_018 = (
    "cfg_container, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, "
    "process_non_loss_data_func=None, store=None"
)
CORE_019 = (
    "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None, "
    "process_non_loss_data_func=None, store=None"
)


@pytest.mark.parametrize("signature", [CORE_016, CORE_018, CORE_019])
def test_every_form_gets_the_same(load: Load, signature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrain, seen = recorder(signature)
    adapter = load(pretrain)
    adapter.check_megatron_lm()
    adapter.run_pretrain("datasets", "model", "step")
    given = ("train_valid_test_dataset_provider", "model_provider", "forward_step_func")
    assert [seen[name] for name in given] == ["datasets", "model", "step"]
    assert seen["model_type"].name == "encoder_or_decoder"
    arguments = seen["cfg_container"][1] if "cfg_container" in seen else seen
    assert arguments["args_defaults"] == {}
    assert arguments["extra_args_provider"].func is add_prefix_tree_args
    assert arguments["extra_args_provider"].keywords == {"args_defaults": {}}


@pytest.mark.parametrize("takes", [False, True])
def test_a_pass_before_a_step_needs_a_communicator(load: Load, monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    pretrain, seen = recorder(CORE_019 + ", p2p_communicator=None, pg_collection=None" * takes)
    adapter = load(pretrain)
    monkeypatch.setattr(adapter, "get_args", lambda: argparse.Namespace(pipeline_model_parallel_size=2))
    adapter.run_pretrain("datasets", "model", "step", steps="steps")
    added = seen["cfg_container"][1]["extra_args_provider"].keywords
    assert added == {"args_defaults": {}} | ({"runs_ahead": True} if takes else {})
    assert (seen.get("p2p_communicator") is not None) == takes


def test_help_has_our_arguments_if_pretrain_parses_without_them(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """core_v0.16.1's ``pretrain`` parses once for its fault tolerance before it parses with extra arguments."""
    pretrain, seen = recorder(CORE_016)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", "--help"])
    with pytest.raises(SystemExit) as left:
        load(pretrain).run_pretrain("datasets", "model", "step")
    assert left.value.code == 0
    assert not seen
    assert "--prefix-tree-max-tokens N" in capsys.readouterr().out


@pytest.mark.parametrize(
    "signature",
    [
        CORE_016.replace("args_defaults", "defaults"),
        CORE_019.replace("cfg_container", "config"),
        CORE_019.replace("forward_step_func", "step"),
    ],
)
def test_another_form_is_refused(load: Load, signature: str) -> None:
    adapter = load(recorder(signature)[0])
    with pytest.raises(ArgumentError, match=r"checkout is Megatron-LM .*; check out core_v0.16.1, "):
        adapter.check_megatron_lm()


def test_help_of_a_parser_that_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    megatrons = argparse.ArgumentParser()
    megatrons.add_argument("--headroom", help="of 10%)")
    parser = add_prefix_tree_args(megatrons)
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--prefix-tree-max-tokens N" in shown
    assert "cannot show its own arguments: unsupported format character" in shown
    assert parser.parse_args(["--headroom", "1"]).headroom == "1"


def test_arguments_without_the_flag_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = add_prefix_tree_args(argparse.ArgumentParser())
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--prefix-tree-max-tokens", "1"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: --prefix-tree-max-tokens needs --prefix-tree, which is missing\n"
