"""Copies of upstream releases, to try patches on: the installed megatron-core, and wheels from the index."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.wheels import wheel

ROOT = Path(__file__).parents[2]
PATCHES = {
    project: sorted((ROOT / "patches" / project).glob("*.patch")) for project in ("megatron-lm", "transformer-engine")
}
# The releases that the patches are written for.
MEGATRON, TRANSFORMER_ENGINE = "0.19.2", "2.20.2"


def apply_patches(project: str, folder: Path, *options: str) -> None:
    """Apply the patches of a project to a copy of its sources, by ``git apply`` as patches/README.md says."""
    command = ["git", "apply", *options, *map(str, PATCHES[project])]
    # A repository around the copy would make git leave out its files.
    done = subprocess.run(command, cwd=folder, env={"GIT_CEILING_DIRECTORIES": "/"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def require_patchable(version: str | None) -> None:
    """Skip a test on a megatron-core that the patches are not written for."""
    if version is None or not version.startswith("0.19."):
        pytest.skip(f"the patches are written for megatron-core 0.19, not {version}")


def version_of(megatron_lm: Path) -> str:
    """Return the version of a checkout's or a package's megatron-core."""
    text = (megatron_lm / "megatron/core/package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, flags=re.MULTILINE))


def installed_core() -> str | None:
    """Return the version of the megatron-core that pip installed; None with only a checkout."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def megatron_core(version: str | None, into: Path, cache: pytest.Cache) -> Path:
    """Copy megatron-core; the installed one if no version is named."""
    if version is not None:
        source = wheel("megatron-core", version, cache)
    else:
        spec = importlib.util.find_spec("megatron.core")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parents[2]
    return copied(source, into)


def copied(source: Path, into: Path) -> Path:
    """Copy the package megatron of a folder, without what Python compiled."""
    shutil.copytree(source / "megatron", into / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    return into


def content(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
