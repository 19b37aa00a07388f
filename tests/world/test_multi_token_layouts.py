"""Multi-token prediction of a folded step equals the stock model's on unfolded samples, in every parallel layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.folded_jobs import Job
from harness.folded_runs import DELTA_NET, FP32_INSIDE, FP64, LONGEST, MAMBA, MOE, check, folded, oracle
from harness.layouts import shallow
from harness.worlds import Layout

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

if not HAS_DEPTHS:
    pytest.skip(f"needs {NEEDS_DEPTHS}", allow_module_level=True)

DEPTHS = (("mtp_num_layers", 2), ("mtp_loss_scaling_factor", 0.5))
RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
JOB = Job(config=DEPTHS, way="weighted sum", double=True, max_tokens=LONGEST + 10)
HYBRID = replace(JOB, pattern="*-*-/*-/*-")
TP2, TP2_SP, PP2 = Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)


def shallower(job: Job, layout: Layout) -> Job:
    """A job with the fewest layers of the layout, unless a pattern has them."""
    return job if job.pattern else replace(job, config=job.config + shallow(layout))


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, TP2, JOB, id="tp2"),
        pytest.param(2, TP2_SP, replace(JOB, config=DEPTHS + RECOMPUTE), id="tp2-sp-recompute"),
        pytest.param(2, PP2, JOB, id="pp2"),
        pytest.param(2, Layout(pp=2, vpp=2), JOB, id="pp2-vpp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(), JOB, id="dp2", marks=pytest.mark.ci),
        pytest.param(2, TP2_SP, replace(JOB, config=DEPTHS + MOE), id="experts-tp2-sp", marks=pytest.mark.ci),
        pytest.param(2, Layout(ep=2), replace(JOB, config=DEPTHS + MOE), id="experts-ep2", marks=pytest.mark.ci),
        pytest.param(2, TP2, HYBRID, id="hybrid-tp2", marks=pytest.mark.ci),
        pytest.param(2, TP2_SP, replace(HYBRID, config=DEPTHS + RECOMPUTE), id="hybrid-tp2-sp-recompute"),
        pytest.param(2, PP2, replace(HYBRID, pattern="*-|*-/*-/*-"), id="hybrid-pp2", marks=pytest.mark.ci),
        pytest.param(
            2, Layout(pp=2, vpp=2), replace(HYBRID, pattern="*|-|*|-/*-/*-"), id="hybrid-pp2-vpp2", marks=pytest.mark.ci
        ),
        pytest.param(2, Layout(), HYBRID, id="hybrid-dp2", marks=pytest.mark.ci),
        pytest.param(
            2,
            TP2_SP,
            replace(HYBRID, pattern="M-*-/M-/M-", config=DEPTHS + MAMBA),
            id="mamba-tp2-sp",
            marks=pytest.mark.ci,
        ),
        pytest.param(2, PP2, replace(HYBRID, pattern="G-|*-/G-/G-", config=DEPTHS + DELTA_NET), id="delta-net-pp2"),
    ],
)
def test_every_layout(size: int, layout: Layout, job: Job) -> None:
    job = shallower(job, layout)
    check(folded(size, layout, job), oracle(job), FP32_INSIDE if MOE[0] in job.config else FP64)


CUT = {"max_tokens": 20, "over_budget": "carry"}


@pytest.mark.parametrize(
    ("layout", "job"),
    [
        pytest.param(TP2_SP, replace(JOB, config=DEPTHS + RECOMPUTE), id="tp2-sp-recompute"),
        pytest.param(PP2, JOB, id="pp2"),
        pytest.param(Layout(), HYBRID, id="hybrid-dp2", marks=pytest.mark.ci),
        pytest.param(Layout(pp=2, vpp=2), JOB, id="pp2-vpp2", marks=pytest.mark.ci),
        pytest.param(
            PP2,
            replace(HYBRID, pattern="G-|*-/G-/G-", config=DEPTHS + DELTA_NET),
            id="delta-net-pp2",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_trees_in_chunks(layout: Layout, job: Job) -> None:
    """Above the budget, a row reads hidden states of other chunks, on the last stage."""
    job = shallower(job, layout)
    check(folded(2, layout, replace(job, **CUT)), oracle(job), FP64)
