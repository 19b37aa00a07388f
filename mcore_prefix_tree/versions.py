"""What is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """Of an installed package; None of one that is not, or that is read from a path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
