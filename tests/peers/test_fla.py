"""FLA's own kernels, in Triton's interpreter, take states through a tree as they do along each path by itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from harness.commands import run_process
from harness.marks import quick
from harness.wheels import wheel

from mcore_prefix_tree.mcore.release import HAS_DELTA_NET

if not HAS_DELTA_NET:
    pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19", allow_module_level=True)

TESTS = Path(__file__).parents[1]
# megatron-core's own extra takes 0.4; since 0.5 one kernel solves a chunk, and since 0.5.1 decays are exponents of 2.
VERSIONS = ("0.4.2", "0.5.0", "0.5.1", "0.5.2", "0.6.0")


@pytest.mark.ci
@pytest.mark.parametrize("version", quick("0.4.2", "0.6.0", of=VERSIONS))
def test_kernels_follow_a_tree(version: str, pytestconfig: pytest.Config) -> None:
    folders = [wheel("fla-core", version, pytestconfig.cache), TESTS.parent, TESTS]
    result = run_process(
        [sys.executable, "-W", "ignore", str(TESTS / "peers" / "fla_in_interpreter.py")],
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))},
        code=0,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    # Rounding of fp32 in sums of a hundred terms.
    assert max(found["errors"].values()) < 2e-6
    assert found["from the whole rule"] < 2e-6
    levels, launches, of_whole_rule = found["launches"]
    apart = int(version < "0.5")
    assert launches == 2 * levels + 10 + apart
    assert of_whole_rule == (12 + apart) * levels
