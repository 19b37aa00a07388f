"""A patched megatron-core: stock layer specs train folded, and without a tree nothing has changed.

The patched copy is used in another process, with it first on the path: this one has the installed
megatron-core.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.commands import run_process
from sources import ROOT, apply_patches, copied, megatron_core, require_patchable, version_of

pytestmark = pytest.mark.ci
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Copies:
    """Copies of one version of megatron-core."""

    released: Path
    patched: Path


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("0.19.2", "checkout")]


@pytest.fixture(scope="module", params=["installed", *SLOW])
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    folders = [tmp_path_factory.mktemp(name) for name in ("released", "patched")]
    if request.param == "checkout":
        if "MEGATRON_LM_PATH" not in os.environ:
            pytest.skip("MEGATRON_LM_PATH is not set")
        both = [copied(Path(os.environ["MEGATRON_LM_PATH"]), folder) for folder in folders]
    else:
        version = None if request.param == "installed" else request.param
        if version is not None:
            pytest.importorskip("triton", reason="megatron-core 0.19 imports triton")
        both = [megatron_core(version, folder, request.config.cache) for folder in folders]
    require_patchable(version_of(both[1]))
    apply_patches("megatron-lm", both[1], "--include=megatron/core/*")
    return Copies(*both)


def run(core: Path, *arguments: str) -> str:
    """Python's output with a megatron-core first on its path."""
    path = [core, HERE.parent, HERE.parent / "unit", HERE.parent / "model", ROOT]
    result = run_process(
        [sys.executable, *arguments],
        env={"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        timeout=900,
        code=0,
    )
    return result.stdout


def pytest_on(core: Path, *arguments: str) -> None:
    """Every test passes, and none is skipped."""
    output = run(core, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *arguments)
    assert re.search(r"\d\d passed", output.splitlines()[-1]), output
    assert "skipped" not in output.splitlines()[-1], output


def test_stock_specs_train_folded(copies: Copies) -> None:
    pytest_on(copies.patched, str(HERE / "native_seam.py"))


def test_patched_core_without_a_tree_has_the_same_bits(copies: Copies) -> None:
    digests = [run(core, str(HERE / "stock_digest.py")) for core in (copies.released, copies.patched)]
    lines = [re.findall(r"^.* [0-9a-f]{64}$", digest, flags=re.MULTILINE) for digest in digests]
    assert len(set(lines[0])) == 7
    assert lines[0] == lines[1]
