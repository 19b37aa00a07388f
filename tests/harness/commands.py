"""The command line in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from mcore_prefix_tree.cli.main import app

# Packages that take seconds, or tenths of one, to import.
SLOW_PACKAGES = {"megatron", "transformer_engine", "torch", "transformers", "mistral_common", "matplotlib"}


def run_command(*words: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Any:
    """Run a command line; its words are those after the program's name."""
    return CliRunner().invoke(app, [*map(str, words)], input=stdin, env=env)
