"""The command behind ``scripts/patches``; see ``patches/README.md``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from source_patches import (
        TITLES,
        FileState,
        Series,
        State,
        Target,
        check_fits,
        examine,
        left_out,
        nearest,
        read_manifest,
        replace_files,
        series_for,
    )

    from mcore_prefix_tree.cli.boundary import Commands
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}; activate the environment that mcore_prefix_tree is installed in, or name its PYTHON")

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

MegatronLM = Annotated[
    Path | None,
    typer.Option("--megatron-lm", metavar="DIR", help="Checkout of Megatron-LM, or a folder that contains megatron."),
]
TransformerEngine = Annotated[
    Path | None,
    typer.Option(
        "--transformer-engine",
        metavar="DIR",
        help="Checkout of TransformerEngine, or a folder that contains transformer_engine.",
    ),
]
Installed = Annotated[
    bool,
    typer.Option("--installed", help="The megatron-core, and TransformerEngine if any, that this Python imports."),
]
AsVersion = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="For a fork with its own version numbers: the version it descends from."),
]

Examined = tuple[Target, Series, list[FileState]]


@app.callback()
def _options() -> None:
    """Source patches for forks. The layer specs of mcore_prefix_tree do not need them."""


@app.command("list")
def list_() -> None:
    """Show every patch: its version, files and reason, whether upstream has it and when it can be removed."""
    console = Console(highlight=False)
    for series in read_manifest():
        console.print(f"\n[bold]{series.title}[/bold] ({series.commit[:12]}), for {', '.join(series.versions)}")
        for patch in series.patches:
            console.print(f"  {patch.path.name}")
            rows = Table.grid(padding=(0, 2), pad_edge=True)
            for label, text in [
                ("files", "\n".join(patch.files)),
                ("why", patch.why),
                ("upstream", patch.upstream),
                ("until", patch.until),
            ]:
                rows.add_row(f"    {label}", escape(text))
            console.print(rows)


@app.command()
def check(
    megatron_lm: MegatronLM = None,
    transformer_engine: TransformerEngine = None,
    installed: Installed = False,
    as_version: AsVersion = None,
) -> None:
    """Report for every file whether the patches are applied or can be, and which hunks have moved; change nothing.

    A version without patches is compared with the patches that fit best.
    """
    for target, series, files in _examined(megatron_lm, transformer_engine, installed, as_version, or_nearest=True):
        typer.echo(f"{TITLES[target.project]} {target.version} in {target.root}, patches of {series.base}:")
        for file in files:
            typer.echo(f"  {file.name}: {file.state.value}")
        _say_left_out(target, series)
        _say_moved(files)
        problems = [problem for file in files for problem in file.problems.get(False, ())]
        for problem in problems:
            typer.echo(f"  {problem}")
        if problems:
            raise ValueError(
                f"cannot apply the patches of {series.title} in {target.root}: the {len(problems)} hunks above differ"
            )
        if as_version is None and target.version not in series.versions:
            typer.echo(f"  every hunk fits: apply them with --as-version {series.versions[0]}")


@app.command()
def apply(
    megatron_lm: MegatronLM = None,
    transformer_engine: TransformerEngine = None,
    installed: Installed = False,
    as_version: AsVersion = None,
) -> None:
    """Apply all patches for the version that is found, or none of them if one does not fit."""
    _change(_examined(megatron_lm, transformer_engine, installed, as_version), State.ORIGINAL)


@app.command()
def revert(
    megatron_lm: MegatronLM = None,
    transformer_engine: TransformerEngine = None,
    installed: Installed = False,
    as_version: AsVersion = None,
) -> None:
    """Restore the files to their content before the patches were applied."""
    _change(_examined(megatron_lm, transformer_engine, installed, as_version), State.PATCHED)


def _examined(
    megatron_lm: Path | None,
    transformer_engine: Path | None,
    installed: bool,
    as_version: str | None,
    *,
    or_nearest: bool = False,
) -> list[Examined]:
    if installed and (megatron_lm or transformer_engine):
        raise ValueError("--installed finds the folders itself; omit --megatron-lm and --transformer-engine")
    targets = _installed_targets() if installed else []
    if megatron_lm is not None:
        targets.append(Target.megatron_lm(megatron_lm.resolve()))
    if transformer_engine is not None:
        targets.append(Target.transformer_engine(transformer_engine.resolve()))
    if not targets:
        raise ValueError("nothing to patch; set --megatron-lm DIR, --transformer-engine DIR or --installed")
    if as_version is not None and len(targets) > 1:
        raise ValueError("--as-version applies to one project; name only one")
    every = read_manifest()
    chosen = []
    for target in targets:
        is_known = any(target.version in series.versions for series in every if series.project == target.project)
        if or_nearest and as_version is None and not is_known:
            chosen.append((target, nearest(target, every)))
        else:
            chosen.append((target, series_for(target, every, as_version=as_version)))
    return [(target, series, examine(target, series)) for target, series in chosen]


def _installed_targets() -> list[Target]:
    megatron = find_spec("megatron") and find_spec("megatron.core")
    if megatron is None or megatron.origin is None:
        raise ValueError(f"--installed: {sys.executable} has no megatron-core; name a folder with --megatron-lm DIR")
    targets = [Target.megatron_lm(Path(megatron.origin).resolve().parents[2])]
    engine = find_spec("transformer_engine")
    if engine is not None and engine.origin is not None:
        targets.append(Target.transformer_engine(Path(engine.origin).resolve().parents[1]))
    return targets


def _change(examined: list[Examined], wanted: State) -> None:
    """Switch the files in a state to their other content; all targets, or none."""
    revert = wanted is State.PATCHED
    for target, series, files in examined:
        check_fits(target, series, files, revert=revert)
    to_change = [file for _, _, files in examined for file in files if file.state is wanted]
    for target, series, files in examined:
        if target.wheel and not revert and any(file.state is wanted for file in files):
            typer.echo(
                f"warning: {target.root} was installed by pip, which does not know about this change; patch only your "
                "own environment, and revert before you upgrade",
                err=True,
            )
        _say_left_out(target, series)
        _say_moved([file for file in files if file.state is wanted])
    replace_files(to_change)
    for target, series, files in examined:
        count = sum(file.state is wanted for file in files)
        done = "reverted in" if revert else "applied to"
        what = f"{series.title}: {done} {count} of {len(files)} files" if count else f"{series.title}: nothing to do"
        typer.echo(f"{what} in {target.root}" if count else f"{what}, {target.root} is {_already(revert)}")


def _already(revert: bool) -> str:
    return "as it came" if revert else "patched already"


def _say_left_out(target: Target, series: Series) -> None:
    if names := left_out(target, series):
        typer.echo(f"  skipped, because a wheel does not contain them: {', '.join(names)}")


def _say_moved(files: Sequence[FileState]) -> None:
    for moved in (line for file in files for line in file.moved):
        typer.echo(f"  {moved}")


if __name__ == "__main__":
    app()
