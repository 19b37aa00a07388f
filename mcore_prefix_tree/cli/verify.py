"""``mcore-prefix-tree verify``: check the installation, or folded against unfolded on a recipe's first batch."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import HuggingFace, load_job
from mcore_prefix_tree.utils.errors import FAILED, leave


def verify(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A YAML file; see recipes/. Without it the installation is checked."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example model.dtype=float64.")
    ] = None,
    hf: HuggingFace = None,
    megatron_lm_path: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Without RECIPE: a checkout of Megatron-LM to check, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show that folding changes nothing but the cost: log-probabilities, loss and every gradient, on your model.

    Without a recipe: whether the installed megatron-core has every name that this package relies on.

    Exit code 1 if an error is above its limit, or if a name is missing.
    """
    if recipe is None:
        if hf is not None:
            raise ValueError("verify --hf needs a RECIPE, whose first batch it compares")
        from mcore_prefix_tree.cli.installed import show_installed

        if not show_installed(megatron_lm_path, as_json=as_json):
            leave(FAILED)
        return
    if megatron_lm_path is not None:
        raise ValueError("--megatron-lm-path goes with no RECIPE: mcore-prefix-tree verify --megatron-lm-path DIR")
    from mcore_prefix_tree.settings.command_checks import Task

    loaded = load_job(recipe, overrides, Task.VERIFY, hf=hf)
    from rich.console import Console

    from mcore_prefix_tree.cli.console import ConsoleReporter, print_verified
    from mcore_prefix_tree.mcore.loop.jobs import run_once, verify_first

    # Standard output is for the result.
    reporter = ConsoleReporter(Console(stderr=True))
    try:
        work = partial(verify_first, progress=partial(reporter.comparing, "verify"))
        report, is_main = run_once(loaded, work)
    finally:
        reporter.close()
    if is_main and as_json:
        print(json.dumps(report.to_json()))
    elif is_main:
        print_verified(Console(), report)
    if not report.passed:
        leave(FAILED)
