"""Copies of upstream releases, to try patches on: the installed megatron-core, and wheels from the index."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.wheels import wheel

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lib"))

import source_patches

ROOT = Path(__file__).parents[2]
# By the name of a test: the version, None for the installed one.
MEGATRON = {"installed": None, "0.19.0": "0.19.0", "0.19.2": "0.19.2"}
TRANSFORMER_ENGINE = ("2.17.0", "2.17.1", "2.18.0", "2.19.0", "2.20.2")


def patches(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``scripts/patches``, run from elsewhere."""
    return subprocess.run(
        [str(ROOT / "scripts" / "patches"), command, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHON": sys.executable},
    )


def require_series(megatron_lm: Path) -> None:
    """Skip if no patches exist for a checkout's or a package's version."""
    try:
        source_patches.series_for(source_patches.Target.megatron_lm(megatron_lm), source_patches.read_manifest())
    except source_patches.PatchError as error:
        pytest.skip(str(error))


def installed_core() -> str | None:
    """Return the version of the megatron-core that pip installed; None with only a checkout."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def copied(folder: Path, package: str, into: Path) -> Path:
    """A copy of a package and of pip's records about it."""
    found = [
        folder / package,
        *folder.glob("megatron_core-*.dist-info"),
        *folder.glob("transformer_engine-*.dist-info"),
    ]
    for path in found:
        shutil.copytree(path, into / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    return into


def megatron_core(version: str | None, into: Path, cache: pytest.Cache) -> Path:
    """A copy of megatron-core; the installed one if no version is named."""
    if version is not None:
        return copied(wheel("megatron-core", version, cache), "megatron", into)
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return copied(Path(spec.origin).parents[2], "megatron", into)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and nothing but files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
