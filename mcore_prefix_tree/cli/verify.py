"""``mcore-prefix-tree verify``: folded against unfolded on a recipe's first batch."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import HuggingFace, job_of
from mcore_prefix_tree.errors import FAILED, leave


def verify(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file; see recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example model.dtype=float64.")
    ] = None,
    hf: HuggingFace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show that folding changes nothing but the cost: log-probabilities, loss and every gradient, on your model.

    Exit code 1 if an error is above its limit.
    """
    loaded = job_of(recipe, overrides, hf)
    from rich.console import Console

    from mcore_prefix_tree.cli.console import ConsoleReporter, print_verified
    from mcore_prefix_tree.mcore.trainer.jobs import run_once, verify_first

    # Standard output is for the result.
    reporter = ConsoleReporter(Console(stderr=True))
    try:
        report, is_main = run_once(loaded, partial(verify_first, progress=partial(reporter.comparing, "verify")))
    finally:
        reporter.close()
    if is_main and as_json:
        print(json.dumps(report.to_json()))
    elif is_main:
        print_verified(Console(), report)
    if not report.passed:
        leave(FAILED)
