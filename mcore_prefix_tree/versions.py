"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed, or is read from a path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
