"""Versions of installed packages, and commands to install the extras of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path


def installed_version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed, or is read from a path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def list_requirements(extra: str) -> list[str]:
    """Return an extra's requirements, for example ``pyarrow>=16``; PackageNotFoundError or KeyError if unknown."""
    found = []
    for text in requires("mcore-prefix-tree") or ():
        requirement, _, marker = text.partition(";")
        if marker.replace("'", '"').strip() == f'extra == "{extra}"':
            found.append(requirement.strip())
    if not found:
        raise KeyError(extra)
    return found


def install_command(extra: str) -> str:
    """Return the command that installs an extra's requirements by name: this package is not on a package index."""
    try:
        wanted = list_requirements(extra)
    except PackageNotFoundError:
        wanted = [f"{Path(__file__).parents[2]}[{extra}]"]  # the clone that this is read from
    return "pip install " + " ".join(f"'{one}'" for one in wanted)
