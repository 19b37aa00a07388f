"""Wheels from the index."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest


def wheel(name: str, version: str, cache: pytest.Cache) -> Path:
    """A wheel's content, unpacked once; skips where pip cannot download it. All of them are small."""
    folder = cache.mkdir("wheels") / f"{name}-{version}"
    if not folder.is_dir():
        download = Path(tempfile.mkdtemp(dir=folder.parent))  # other workers may want the same
        # The Python files are the same in every wheel of a version: any one will do.
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64"]
        command = [sys.executable, "-m", "pip", "download", *options, "--platform=any", "--dest", str(download)]
        result = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
        if result.returncode:
            reason = next((line for line in result.stderr.splitlines() if line.startswith("ERROR")), "no message")
            pytest.skip(f"pip cannot download {name} {version}: {reason}")
        (archive,) = download.glob("*.whl")
        unpacked = download / "unpacked"
        with zipfile.ZipFile(archive) as content:
            content.extractall(unpacked)
        with contextlib.suppress(OSError):  # another worker was first
            unpacked.rename(folder)
        shutil.rmtree(download)
    return folder
