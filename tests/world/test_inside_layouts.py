"""Folding inside the model equals the stock model on unfolded samples, in every parallel layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.folded_runs import DELTA_NET, FP32_INSIDE, FP64, LATENT, MAMBA, MOE, SAMPLES, SPARSE, check
from harness.layouts import LAYOUTS, RECOMPUTE, in_layouts, in_pipeline, lacking, shallow
from harness.models import HAS_OUTPUT_PROCESSOR
from harness.worlds import Layout, WorkerError, world
from inside_jobs import InsideJob, inside, inside_gradients, rows_without_a_vocabulary, unfolded_oracle

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

MROPE = (("mrope_section", [4, 2, 2]),)
PICTURES = InsideJob(positions="mrope", config=MROPE)
PATTERN = InsideJob(pattern="*-*-", check_first=True)
EXACT = InsideJob(double=True, check_first=True)
STATES, SPACES = (
    replace(EXACT, pattern=f"{one}-{one}*", config=size) for one, size in (("G", DELTA_NET), ("M", MAMBA))
)
CHOOSES = InsideJob(double=True, config=LATENT + SPARSE)
# A job, its layouts by default, and those in CI.
JOBS: dict[str, tuple[InsideJob, str, str]] = {
    "labels": (InsideJob(), "tp2-sp pp2-vpp2 dp2", "single tp2 pp2"),
    "logits": (InsideJob(reads="logits"), "tp2-sp pp2-vpp2 dp2", "single tp2 pp2"),
    "log-probabilities": (InsideJob(reads="logprobs"), "tp2-sp pp2", ""),
    "a processor": (InsideJob(reads="processor"), "tp2-sp pp2", ""),
    "pictures": (PICTURES, "tp2-sp pp2-vpp2", "tp2 pp2 tp2-pp2"),
    "tied": (InsideJob(share_embeddings=True), "", "pp2"),
    "latent": (InsideJob(config=LATENT), "tp2-sp", "pp2"),
    "experts": (InsideJob(config=MOE), "tp2-sp", "ep2"),
    "recompute": (InsideJob(config=RECOMPUTE), "", "tp2 pp2"),
    "checked first": (InsideJob(check_first=True), "tp2-sp", "pp2-vpp2"),
    "experts, checked first": (InsideJob(config=MOE, check_first=True), "", "ep2"),
    # Rows go through the stock model.
    "nothing shared": (InsideJob(reads="logits", packed_attention=True), "tp2-sp", "pp2-vpp2"),
    "log-probabilities, nothing shared": (InsideJob(reads="logprobs", packed_attention=True), "tp2-sp", "pp2-vpp2"),
    "parts": (InsideJob(max_tokens=24), "tp2-sp pp2-vpp2", "single dp2 tp2 pp2 tp2-pp2"),
    "parts, experts": (InsideJob(config=MOE, max_tokens=24), "tp2-sp", ""),
    # A rank with fewer parts than the other, or none, runs parts of padding.
    "small parts, experts": (InsideJob(config=MOE, max_tokens=12), "ep2", ""),
    "parts of the larger rank, experts": (InsideJob(config=MOE, max_tokens=30), "ep2", ""),
    "parts, latent": (InsideJob(config=LATENT, max_tokens=24), "pp2", ""),
    "parts, pictures": (replace(PICTURES, max_tokens=24), "tp2-sp", ""),
    "parts, recompute": (InsideJob(config=RECOMPUTE, max_tokens=24), "", "pp2"),
    # Megatron's DDP sums over ranks when each parameter has had as many gradients as in the first step.
    "parts, overlapped sums": (InsideJob(max_tokens=12, overlaps=True), "dp2", ""),
    "pattern": (PATTERN, "tp2-sp", ""),
    "pattern, log-probabilities": (replace(PATTERN, reads="logprobs"), "pp2", ""),
    "pattern, logits": (replace(PATTERN, reads="logits"), "", "pp2-vpp2"),
    # A stage without attention, and then a chunk of all stages.
    "pattern, nothing shared": (replace(PATTERN, unlike=True), "pp2", ""),
    "attention behind MLPs, nothing shared": (replace(PATTERN, pattern="--**", unlike=True), "pp2-vpp2", ""),
    "delta net": (STATES, "", "tp2-sp"),
    "parts, delta net": (replace(STATES, max_tokens=24), "tp2-sp", ""),
    "Mamba": (SPACES, "", "tp2-sp"),
    "parts, Mamba": (replace(SPACES, max_tokens=24), "tp2-sp", ""),
    "sparse": (replace(CHOOSES, pattern="D-DD"), "", "tp2-sp"),
    "parts, sparse": (replace(CHOOSES, max_tokens=24), "tp2-sp", ""),
}


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(job, layout, id=f"{name}-{layout}", marks=marks)
        for name, (job, quick, ci) in JOBS.items()
        for layouts, marks in ((quick, ()), (ci, pytest.mark.ci))
        for layout in layouts.split()
    ],
)
def test_every_layout(job: InsideJob, name: str) -> None:
    size, layout = LAYOUTS[name]
    if reason := lacking(job, layout):
        pytest.skip(reason)
    if job.reads == "processor" and not HAS_OUTPUT_PROCESSOR:
        pytest.skip("came with megatron-core 0.18")
    given = replace(job, pattern=in_pipeline(job.pattern, layout))
    limit = FP32_INSIDE if "num_moe_experts" in dict(job.config) else FP64
    check(inside(size, layout, given), unfolded_oracle(layout, job), limit)


@in_layouts("tp2-sp", ci=["pp2-vpp2"])
def test_forward_only(size: int, layout: Layout) -> None:
    """As trainers compute the log-probabilities of old and reference policies."""
    loss, gradients = inside(size, layout, InsideJob(forward_only=True))
    expected, _ = unfolded_oracle(layout, InsideJob())
    assert abs(loss - expected) <= FP64 * abs(expected)
    assert not any(gradient.any() for gradient in gradients.values())


def test_stages_that_cannot_send_other_sizes_are_refused() -> None:
    layout, job = Layout(pp=2), InsideJob(config=(("variable_seq_lengths", False),))
    with pytest.raises(WorkerError, match="set variable_seq_lengths=True"):
        world(2).run(inside_gradients, layout, job, SAMPLES, layout=layout)


DEPTHS = (("mtp_num_layers", 2), ("mtp_loss_scaling_factor", 0.5))


@pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}")
@pytest.mark.parametrize(
    ("layout", "job"),
    [
        pytest.param(Layout(tp=2, sequence_parallel=True), InsideJob(), id="tp2-sp"),
        pytest.param(Layout(pp=2), InsideJob(), id="pp2"),
        pytest.param(Layout(pp=2, vpp=2), InsideJob(), id="pp2-vpp2", marks=pytest.mark.ci),
        pytest.param(Layout(tp=2, sequence_parallel=True), InsideJob(config=MOE), id="experts-tp2-sp"),
        pytest.param(Layout(pp=2), InsideJob(pattern="*-|*-/*-/*-"), id="hybrid-pp2", marks=pytest.mark.ci),
    ],
)
def test_multi_token_prediction(layout: Layout, job: InsideJob) -> None:
    """As in one process, which equals the stock model: Megatron's mean is over the labels of a micro-batch."""
    job = replace(job, config=DEPTHS + (() if job.pattern else shallow(layout)) + job.config)
    in_one = replace(job, pattern=None if job.pattern is None else job.pattern.replace("|", ""))
    check(inside(2, layout, job), inside(1, Layout(), in_one), FP32_INSIDE if MOE[0] in job.config else FP64)


@pytest.mark.parametrize("head", ["none", "scalar"])
@in_layouts("tp2-sp", slow=["tp2"])
def test_hidden_states_and_values(size: int, layout: Layout, head: str) -> None:
    for errors in world(size).run(rows_without_a_vocabulary, layout, head, SAMPLES, layout=layout):
        assert max(errors.values()) <= FP64, max(errors, key=errors.get)
