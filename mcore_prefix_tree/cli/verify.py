"""``mcore-prefix-tree verify``: check folded against unfolded on a recipe's first batch."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import HuggingFace, RecipeFile, load_job, overrides_like
from mcore_prefix_tree.utils.errors import FAILED, exit_with


def verify(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("model.dtype=float64")] = None,
    hf: HuggingFace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show that folding changes nothing but the cost: log-probabilities, loss and every gradient, on your model.

    Exit code 1 if an error is above its limit.
    """
    loaded = load_job(recipe, overrides, "verify", hf=hf)
    from rich.console import Console

    from mcore_prefix_tree.cli.console import ConsoleReporter, print_verified
    from mcore_prefix_tree.mcore.loop.jobs import run_once, verify_first

    # Standard output is for the result.
    with closing(ConsoleReporter(Console(stderr=True))) as reporter:
        work = partial(verify_first, progress=partial(reporter.comparing, "verify"))
        report, is_main = run_once(loaded, work)
    if is_main and as_json:
        print(json.dumps(report.to_json()))
    elif is_main:
        print_verified(Console(), report)
    if not report.passed:
        exit_with(FAILED)
