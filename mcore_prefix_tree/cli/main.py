"""``mcore-prefix-tree``: the list of commands. Heavy imports wait until one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from mcore_prefix_tree.cli import bench, xtoken
from mcore_prefix_tree.cli.boundary import Commands
from mcore_prefix_tree.cli.inspect import inspect
from mcore_prefix_tree.cli.jobs import export, recipes, score, train, verify
from mcore_prefix_tree.cli.plan import plan
from mcore_prefix_tree.utils.versions import installed_version_of

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_versions(wanted: bool) -> None:
    if wanted:
        for package in ("mcore-prefix-tree", "megatron-core", "torch"):
            typer.echo(f"{package} {installed_version_of(package) or '(not installed)'}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_versions, help="Show the installed versions and exit."),
    ] = False,
) -> None:
    """Prefix-tree training on stock Megatron-Core: every shared token computed once, every gradient unchanged."""


for command in (train, verify, inspect, plan, score, export, recipes):
    app.command()(command)
app.add_typer(bench.app, name="bench")
app.add_typer(xtoken.app, name="xtoken")
