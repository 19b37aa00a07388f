"""Folding inside the model equals the stock model on unfolded samples, in every parallel layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.folded_runs import FP32_INSIDE, FP64, LATENT, MOE, SAMPLES, check
from harness.layouts import in_layouts, shallow
from harness.models import HAS_OUTPUT_PROCESSOR
from harness.worlds import Layout, WorkerError, world
from inside_jobs import InsideJob, inside, inside_gradients, rows_without_a_vocabulary, unfolded_oracle
from megatron.core.transformer import multi_latent_attention

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))

NEEDS_PROCESSOR = pytest.mark.skipif(not HAS_OUTPUT_PROCESSOR, reason="came with megatron-core 0.18")


@pytest.mark.parametrize("reads", ["labels", "logits"])
@in_layouts("tp2-sp", "pp2-vpp2", "dp2", ci=["single", "tp2", "pp2"])
def test_every_layout(size: int, layout: Layout, reads: str) -> None:
    check(inside(size, layout, InsideJob(reads=reads)), unfolded_oracle(layout), FP64)


@in_layouts("tp2-sp", "pp2-vpp2", ci=["single", "dp2", "tp2", "pp2", "tp2-pp2"])
def test_parts(size: int, layout: Layout) -> None:
    check(inside(size, layout, InsideJob(max_tokens=24)), unfolded_oracle(layout), FP64)


@pytest.mark.parametrize(
    ("layout", "job"),
    [
        pytest.param(Layout(tp=2, sequence_parallel=True), InsideJob(config=MOE), id="moe-tp2-sp"),
        pytest.param(Layout(pp=2), InsideJob(config=LATENT), id="latent-pp2"),
        pytest.param(
            Layout(tp=2, sequence_parallel=True),
            InsideJob(positions="mrope", config=(("mrope_section", [4, 2, 2]),)),
            id="pictures-tp2-sp",
        ),
        pytest.param(Layout(pp=2), InsideJob(config=RECOMPUTE), id="recompute-pp2", marks=pytest.mark.ci),
    ],
)
def test_parts_of_other_models(layout: Layout, job: InsideJob) -> None:
    config = () if job.positions == "mrope" else job.config
    limit = FP32_INSIDE if job.config == MOE else FP64
    check(inside(2, layout, replace(job, max_tokens=24)), unfolded_oracle(layout, config), limit)


def test_parts_give_a_gradient_to_be_summed_once() -> None:
    """Megatron's DDP sums over ranks when each parameter has had as many gradients as in the first step."""
    job = InsideJob(max_tokens=12, overlaps=True)
    check(inside(2, Layout(), job), unfolded_oracle(Layout()), FP64)


@pytest.mark.parametrize("max_tokens", [12, 30], ids=["all ranks", "the larger"])
def test_parts_of_ranks_that_share_experts(max_tokens: int) -> None:
    """A rank with fewer parts than the other, or none, runs parts of padding."""
    job = InsideJob(config=MOE, max_tokens=max_tokens)
    check(inside(2, Layout(ep=2), job), unfolded_oracle(Layout(), MOE), FP32_INSIDE)


@in_layouts("tp2-sp", "pp2-vpp2", ci=["tp2", "pp2", "tp2-pp2"])
def test_pictures(size: int, layout: Layout) -> None:
    job = InsideJob(positions="mrope", config=(("mrope_section", [4, 2, 2]),))
    check(inside(size, layout, job), unfolded_oracle(layout), FP64)


@pytest.mark.parametrize("reads", ["logprobs", pytest.param("processor", marks=NEEDS_PROCESSOR)])
@in_layouts("tp2-sp", "pp2")
def test_output_processors(size: int, layout: Layout, reads: str) -> None:
    check(inside(size, layout, InsideJob(reads=reads)), unfolded_oracle(layout), FP64)


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, Layout(pp=2), InsideJob(share_embeddings=True), id="tied-pp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), InsideJob(config=LATENT), id="latent-tp2-sp"),
        pytest.param(2, Layout(pp=2), InsideJob(config=LATENT), id="latent-pp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), InsideJob(config=MOE), id="moe-tp2-sp"),
        pytest.param(2, Layout(ep=2), InsideJob(config=MOE), id="moe-ep2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2), InsideJob(config=RECOMPUTE), id="recompute-tp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(pp=2), InsideJob(config=RECOMPUTE), id="recompute-pp2", marks=pytest.mark.ci),
    ],
)
def test_other_models(size: int, layout: Layout, job: InsideJob) -> None:
    if job.config == LATENT and layout.sequence_parallel and multi_latent_attention.Linear is None:
        pytest.skip("this megatron-core takes projections that all ranks hold whole only with TransformerEngine")
    limit = FP32_INSIDE if job.config == MOE else FP64
    check(inside(size, layout, job), unfolded_oracle(layout, job.config, job.share_embeddings), limit)


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, Layout(tp=2, sequence_parallel=True), InsideJob(), id="tp2-sp"),
        pytest.param(2, Layout(pp=2, vpp=2), InsideJob(), id="pp2-vpp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(ep=2), InsideJob(config=MOE), id="moe-ep2", marks=pytest.mark.ci),
    ],
)
def test_checking_the_first_micro_batch_changes_nothing(size: int, layout: Layout, job: InsideJob) -> None:
    limit = FP32_INSIDE if job.config == MOE else FP64
    check(inside(size, layout, replace(job, check_first=True)), unfolded_oracle(layout, job.config), limit)


@in_layouts("tp2-sp", ci=["pp2-vpp2"])
def test_forward_only(size: int, layout: Layout) -> None:
    """As trainers compute the log-probabilities of old and reference policies."""
    loss, gradients = inside(size, layout, InsideJob(forward_only=True))
    expected, _ = unfolded_oracle(layout)
    assert abs(loss - expected) <= FP64 * abs(expected)
    assert not any(gradient.any() for gradient in gradients.values())


def test_stages_that_cannot_send_other_sizes_are_refused() -> None:
    layout, job = Layout(pp=2), InsideJob(config=(("variable_seq_lengths", False),))
    with pytest.raises(WorkerError, match="set variable_seq_lengths=True"):
        world(2).run(inside_gradients, layout, job, SAMPLES, layout=layout)


@pytest.mark.parametrize("reads", ["logits", "logprobs"])
@in_layouts("tp2-sp", ci=["pp2-vpp2"])
def test_rows_that_share_nothing(size: int, layout: Layout, reads: str) -> None:
    """They go through the stock model."""
    job = InsideJob(reads=reads, packed_attention=True)
    check(inside(size, layout, job), unfolded_oracle(layout, unlike=True), FP64)


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
