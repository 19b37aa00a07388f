"""The faults of tests/faults_planted, which scripts/planted_faults plants: they fit the code, and tests find them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tests" / "faults_planted").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fault_fits_the_code_and_names_its_tests(patch: Path) -> None:
    sentence, found_by = patch.read_text().splitlines()[:2]
    assert sentence.endswith(".")
    assert found_by.startswith("Found by tests/")
    assert all((ROOT / name.partition("::")[0]).exists() for name in found_by.removeprefix("Found by ").split())
    applied = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True)
    assert applied.returncode == 0, f"{applied.stderr}: write the patch again for the code of today"


@pytest.mark.slow
def test_the_tests_find_all_faults() -> None:
    result = subprocess.run([ROOT / "scripts" / "planted_faults"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
