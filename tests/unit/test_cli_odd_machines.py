"""Paths that are not UTF-8, and settings that are given twice, in commands."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command

NAME = os.fsdecode(b"d\xff")
ROW = '{"tokens": [1, 2, 3]}\n'


def run(folder: Path, *arguments: str, **options: Any) -> tuple[int, str]:
    command = [sys.executable, "-m", "mcore_prefix_tree", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=120, cwd=folder, check=False, **options)
    return done.returncode, done.stderr.decode()


def test_data_of_any_name_are_read(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.jsonl").write_text(ROW)
    assert run(tmp_path, "inspect", f"{NAME}.jsonl") == (0, "")


@pytest.mark.parametrize("name", ["arrow", "parquet", "feather"])
def test_error_names_a_table_that_arrow_cannot_open(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{NAME}.{name}").write_bytes(b"PAR1")
    status, said = run(tmp_path, "inspect", f"{NAME}.{name}")
    assert status == 2
    assert said == f"error: d\\udcff.{name}: Arrow opens no path that is not UTF-8; rename the file\n"


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_tokenizer_folder_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / NAME).mkdir()
    status, said = run(tmp_path, "inspect", "data.jsonl", "--tokenizer", NAME)
    assert status == 2
    assert said.endswith("tokenizer 'd\\udcff': transformers opens no path that is not UTF-8; rename the folder\n")


@pytest.mark.parametrize("key", ["data.path", "checkpoint.save", "model.hf", "data.tokenizer", "log.metrics"])
def test_an_override_that_is_not_utf8_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "recipe.yaml").write_text("data:\n  path: data.jsonl\n")
    result = run_command("train", tmp_path / "recipe.yaml", f"{key}={NAME}", code=2)
    assert result.stderr.startswith(
        f"error: override {f'{key}={NAME}'!r} is not UTF-8; rename the file that it names; "
    )


@pytest.mark.parametrize("option", ["--fields", "--chat-template-kwargs"])
def test_an_option_with_a_key_twice_is_refused(tmp_path: Path, option: str) -> None:
    (data := tmp_path / "data.jsonl").write_text(ROW)
    result = run_command("inspect", data, option, '{"reward": "a", "reward": "b"}', code=2)
    assert result.stderr == f"error: {option}: the key 'reward' is there twice; remove one\n"


def test_recipes_and_overrides_with_a_key_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (recipe := tmp_path / "recipe.yaml").write_text("train_iters: 1\ntrain_iters: 2\n")
    refused = run_command("train", recipe)
    assert "found duplicate key train_iters" in refused.stderr
    recipe.write_text("data: {path: a.jsonl}\n")
    refused = run_command("train", recipe, "data.fields={reward: a, reward: b}")
    assert "found duplicate key reward" in refused.stderr
    run_command("train", recipe, "train_iters=1", "train_iters=2", "seed=3", "seed=3")
    assert caplog.messages == ["train_iters is set twice, to 1 and to 2; the last counts"]
