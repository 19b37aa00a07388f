"""``mcore-prefix-tree recipes``: copy the shipped recipes, their launchers and their data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import local_file

# In a clone a link to its recipes/, in a wheel the files themselves.
SHIPPED = Path(__file__).parents[1] / "shipped_recipes"


def recipes(
    folder: Annotated[
        Path, typer.Argument(parser=local_file, metavar="[FOLDER]", help="Where to make the folder recipes.")
    ] = Path("."),
) -> None:
    """Copy the shipped recipes and the quickstart's data into FOLDER/recipes, to edit and to train."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one, which may be new")
    target = folder / "recipes"
    if target.exists():
        raise ValueError(f"{target} exists already; name another folder")
    # copytree would go on after an error, and put all of them into one.
    for path in sorted(SHIPPED.rglob("*")):
        copy = target / path.relative_to(SHIPPED)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            shutil.copy2(path, copy)
    typer.echo(f"{target}: {sum(path.is_file() for path in target.rglob('*'))} files")
    there = "" if folder == Path(".") else f"cd {folder} && "
    typer.echo(f"{there}mcore-prefix-tree train recipes/quickstart.yaml")
