#!/usr/bin/env python3
"""Resolve the requirements as pip would on a machine with only its package index; install nothing.

    python3 scripts/lib/resolve.py python3.10 python3.11 python3.12  # without arguments: this Python

Downloads a new pip for each Python, and metadata. Ignores installed packages, local wheels and pip's configuration.
Fails if something cannot be resolved or has no wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Requirements that the scripts and the README install, by name; see environment.sh and versions.sh.
INSTALLED = {
    "scripts/quickstart": ["-r", "requirements/torch.txt", "-r", "requirements/base.txt"],
    "scripts/docs": ["-r", "requirements/torch.txt", "-r", "requirements/docs.txt"],
    "scripts/test": ["-r", "requirements/torch.txt", "-r", "requirements/test.txt"],
    "scripts/gpu_check": ["-r", "requirements/torch.txt", "-r", "requirements/gpu.txt"],
    "scripts/gpu_check --pack": [
        *("--no-deps", "-r", "requirements/pack-steps.txt", "-r", "requirements/pack-fa4.txt"),
    ],
    "tests/upstream": [
        *("-r", "requirements/torch.txt", "-r", "requirements/test.txt", "-r", "requirements/megatron-lm.txt"),
    ],
    "tests/peers": ["--no-deps", "-r", "requirements/peers.txt"],
    "Megatron-Bridge, with Python 3.12": ["--no-deps", "-r", "requirements/bridge.txt"],
}
SHOWN = ("torch", "triton", "megatron-core", "flash-attn-4", "verl")


def environment() -> dict[str, str]:
    """Return this environment's variables without those that give pip other indexes or versions."""
    local = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
    kept = {name: value for name, value in os.environ.items() if name not in local}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def resolve(pip: Path, arguments: list[str]) -> str:
    """Return the versions that pip would install, or its error."""
    command = [pip, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    found = json.loads(done.stdout)["install"]
    compiled = [one["metadata"]["name"] for one in found if not one["download_info"]["url"].endswith(".whl")]
    if compiled:
        raise ValueError(f"without a wheel: {', '.join(compiled)}")
    versions = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in found}
    return ", ".join([f"{len(found)} packages", *(f"{name} {versions[name]}" for name in SHOWN if name in versions)])


def main(pythons: list[str]) -> int:
    failed = 0
    for python in pythons or [sys.executable]:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([python, "-m", "venv", folder], check=True)
            pip = Path(folder, "bin", "python")
            subprocess.run([pip, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], env=environment(), check=True)
            for name, arguments in INSTALLED.items():
                try:
                    result = resolve(pip, arguments)
                except ValueError as error:
                    failed, result = 1, f"FAILED: {error}"
                print(f"{python}  {name}: {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
