"""Apply each planted fault to a copy of the repository, and run its tests; scripts/planted_faults calls it.

python scripts/lib/planted_faults.py [--all] [NAME ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "faults_planted"
# Pytest's exit status for tests that failed.
_FAILED = 1


def read_tests(patch: Path) -> list[str]:
    """Return the tests that a patch's second line names."""
    return patch.read_text().splitlines()[1].removeprefix("Found by ").split()


def find(patch: Path, tests: list[str]) -> tuple[bool, str]:
    """Return whether tests fail with a fault, and the last line of their output."""
    with TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for entry in ROOT.iterdir():
            if entry.name in ("mcore_prefix_tree", "tests"):
                shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif entry.name not in (".git", ".venv"):
                (copy / entry.name).symlink_to(entry)
        subprocess.run(["git", "apply", patch], cwd=copy, check=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "not slow",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
        ]
        result = subprocess.run(
            [*command, *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    if result.returncode not in (0, _FAILED):
        raise SystemExit(f"{patch.stem}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}{result.stderr}")
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    return result.returncode == _FAILED, failed[0].removeprefix("FAILED ")[:100] if failed else "every test passed"


def main(arguments: list[str]) -> int:
    """Print a row for each fault; return 1 if tests do not find one of them."""
    names = [one for one in arguments if one != "--all"]
    patches = [FAULTS / f"{name}.patch" for name in names] or sorted(FAULTS.glob("*.patch"))
    missed = 0
    for patch in patches:
        is_found, line = find(patch, ["tests"] if "--all" in arguments else read_tests(patch))
        missed += not is_found
        print(f"{'found' if is_found else 'MISSED':6}  {patch.stem:30}  {line}", flush=True)
    print(f"{len(patches) - missed} of {len(patches)} planted faults are found")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
