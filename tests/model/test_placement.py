"""Operations that a GPU would reject or wait for, found without one: see placement_job.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.marks import quick
from harness.torchrun_jobs import run
from placement_job import BACKENDS, CUT, READOUTS

from mcore_prefix_tree.mcore.release import HAS_SPARSE_ATTENTION
from mcore_prefix_tree.objectives import OBJECTIVES

pytestmark = pytest.mark.ci
OBJECTIVE_TEST = "test_an_objective_stays_on_the_device"
# Each of the others runs the device operations of one of these.
KINDS = ("sft", "grpo", "dpo", "kto", "critic", "reward_model", "distill")
# One needs a second model.
EVERY = quick(*KINDS, of=[name for name in OBJECTIVES if name != "xtoken"])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Run every objective of the selected tests, and everything else."""
    selected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [item.callspec.params["name"] for item in selected if item.originalname == OBJECTIVE_TEST]
    job = str(Path(__file__).with_name("placement_job.py"))
    done = run(1, *names, program=(job,), timeout_s=600, code=0)
    found: dict[str, str] = json.loads(done.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", EVERY)
def test_an_objective_stays_on_the_device(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[f"objective {name}"] == ""


@pytest.mark.parametrize("name", CUT)
def test_a_scoring_pass_stays_on_the_device(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[f"cut {name}"] == ""


@pytest.mark.parametrize("readout", READOUTS)
def test_a_readout_stays_on_the_device(outcomes: dict[str, str], readout: str) -> None:
    assert outcomes[f"readout {readout}"] == ""


@pytest.mark.parametrize("readout", READOUTS)
def test_the_kernels_of_the_head_stay_on_the_device(outcomes: dict[str, str], readout: str) -> None:
    pytest.importorskip("triton")
    assert outcomes[f"kernels {readout}"] == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_stays_on_the_device(outcomes: dict[str, str], backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    assert outcomes[f"attention {backend}"] == ""


@pytest.mark.skipif(not HAS_SPARSE_ATTENTION, reason="sparse attention follows a tree since megatron-core 0.19")
def test_sparse_attention_stays_on_the_device(outcomes: dict[str, str]) -> None:
    pytest.importorskip("triton")
    assert outcomes["sparse attention"] == ""


def test_device_faults_are_detected(outcomes: dict[str, str]) -> None:
    assert "found at least two devices" in outcomes["two devices"]
    assert outcomes["read back"].startswith("DataDependentOutputException")
    assert "a copy to the host" in outcomes["copied back"]
    assert "a blocking copy" in outcomes["blocking copy"]
    assert "pageable memory" in outcomes["pageable copy"]
