"""The command line in this process, and the files of rows that it reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from mcore_prefix_tree.cli.main import app

# Packages that take seconds, or tenths of one, to import.
SLOW_PACKAGES = {"megatron", "transformer_engine", "torch", "transformers", "mistral_common", "matplotlib"}


def run_command(*words: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Any:
    """Run a command line; its words are those after the program's name."""
    return CliRunner().invoke(app, [*map(str, words)], input=stdin, env=env)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a row a line, as JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
