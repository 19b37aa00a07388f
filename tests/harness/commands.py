"""The command line in this process, and the files of rows that it reads."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from mcore_prefix_tree.cli.main import app

# Packages that take seconds, or tenths of one, to import.
SLOW_PACKAGES = {"megatron", "transformer_engine", "torch", "transformers", "mistral_common", "matplotlib"}


def run_command(
    *words: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None, code: int | None = None
) -> Any:
    """Run a command line; its words are those after the program's name. It has to end with the ``code`` if given."""
    done = CliRunner().invoke(app, [*map(str, words)], input=stdin, env=env)
    assert code in (None, done.exit_code), f"{done.output}{done.exception!r}"
    return done


def run_process(
    command: Iterable[object], *, code: int | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run another program in this environment and ``env``; it has to end with the ``code`` if given."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    done = subprocess.run([*map(str, command)], env={**os.environ, **(env or {})}, **options)
    assert code in (None, done.returncode), f"{(done.stdout or '')[-8000:]}{(done.stderr or '')[-8000:]}"
    return done


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a row a line, as JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
