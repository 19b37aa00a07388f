"""TransformerEngine's released Python with our layers: full folded steps, with a stand-in for its compiled part.

``te_compiled.py`` computes the kernels' results. Everything above it is TransformerEngine's own: signatures,
the tensors saved for backward and recomputed, splits and names of weights, data sent between ranks, and the checks that
run before a kernel. It runs in another process, with TransformerEngine first on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.wheels import wheel
from sources import ROOT, apply_patches, installed_core, megatron_core, require_patchable, version_of

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        not (installed_core() or "").startswith("0.19."),
        reason="TransformerEngine 2.20 is tried with megatron-core 0.19",
    ),
]
pytest.importorskip("triton", reason="TransformerEngine imports triton")
TESTS = ROOT / "tests"
VERSION = "2.20.2"


def run(path: list[Path], *arguments: str, files: tuple[str, ...] = ("te_layers.py",)) -> str:
    """Return pytest's last line about files, of which no test may fail."""
    path = [*path, TESTS, *(TESTS / name for name in ("unit", "model", "world", "upstream")), ROOT]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *arguments]
    result = subprocess.run(
        [*command, *(str(TESTS / "upstream" / file) for file in files)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        timeout=900,
        # Megatron sets NVTE_ variables in the process of another test, and refuses others than it would set.
        env={name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("files", "marked"),
    [
        # In one process, which imports Megatron-Core and TransformerEngine once.
        (("te_layers.py", "te_fp8.py", "te_fp8_recipes.py", "te_graphs.py"), "not slow"),
        pytest.param(("te_fp8.py",), "slow", marks=pytest.mark.slow),
    ],
    ids=["not slow", "slow"],
)
def test_folded_is_unfolded(files: tuple[str, ...], marked: str, request: pytest.FixtureRequest) -> None:
    """In the type of the model, in FP8, and with CUDA graphs."""
    path = [wheel("transformer-engine", VERSION, request.config.cache)]
    said = run(path, "-m", marked, "-k", "not patched", files=files)
    assert re.search(r"\d\d passed", said), said
    assert "skipped" not in said


def test_patched_it_attends_by_itself(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """With stock layer specs, on a patched Megatron-Core."""
    core = megatron_core(None, tmp_path / "core", request.config.cache)
    require_patchable(version_of(core))
    engine = tmp_path / "engine"
    shutil.copytree(wheel("transformer-engine", VERSION, request.config.cache), engine)
    apply_patches("megatron-lm", core, "--include=megatron/core/*")
    apply_patches("transformer-engine", engine, "--include=transformer_engine/pytorch/*")
    said = run([engine, core], "-k", "patched or keys")
    assert re.search(r"\b5 passed", said), said
    assert "skipped" not in said
