"""A folded step of a hybrid model equals the stock HybridModel on unfolded samples, in every parallel layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.folded_jobs import Job
from harness.folded_runs import DELTA_NET, FP32_INSIDE, FP64, LATENT, LONGEST, MAMBA, MOE, SPARSE, check, folded, oracle
from harness.layouts import shallow
from harness.worlds import Layout
from inside_jobs import InsideJob, inside, unfolded_oracle

from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_HYBRID_MODEL, HAS_SPARSE_ATTENTION

if not HAS_HYBRID_MODEL:
    pytest.skip("this megatron-core has no HybridModel", allow_module_level=True)

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

VARIANT = (("experimental_attention_variant", "gated_delta_net"), ("linear_attention_freq", 2), ("num_layers", 2))
RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
DENSE = Job(pattern="*-*-", way="weighted sum")
TP2_SP, PP2 = Layout(tp=2, sequence_parallel=True), Layout(pp=2)


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, TP2_SP, DENSE, id="tp2-sp"),
        # Stages of other lengths, of which one begins with an MLP; the embedding's weight is the head's.
        pytest.param(2, PP2, replace(DENSE, pattern="*-*|-", share_embeddings=True), id="pp2-tied"),
        pytest.param(2, Layout(tp=2), replace(DENSE, config=RECOMPUTE), id="tp2-recompute", marks=pytest.mark.ci),
        pytest.param(
            2, PP2, replace(DENSE, pattern="*-|*-", config=RECOMPUTE), id="pp2-recompute", marks=pytest.mark.ci
        ),
        pytest.param(2, PP2, replace(DENSE, way="logits"), id="pp2-cut-evenly-logits", marks=pytest.mark.ci),
        pytest.param(2, Layout(pp=2, vpp=2), replace(DENSE, pattern="*|-|*|-"), id="pp2-vpp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(), DENSE, id="dp2", marks=pytest.mark.ci),
        pytest.param(2, TP2_SP, replace(DENSE, pattern="*E*E", config=MOE), id="experts-tp2-sp"),
        pytest.param(2, PP2, replace(DENSE, pattern="*E|*E", config=MOE), id="experts-pp2", marks=pytest.mark.ci),
        pytest.param(
            2, Layout(ep=2), replace(DENSE, pattern="*E*E", config=MOE), id="experts-ep2", marks=pytest.mark.ci
        ),
        pytest.param(2, PP2, replace(DENSE, pattern="+-|+-", config=LATENT), id="latent-pp2"),
    ],
)
def test_every_layout(size: int, layout: Layout, job: Job) -> None:
    assert job.pattern is not None
    if not set(job.pattern) <= Symbols.VALID_LAYERS | {Symbols.PIPE}:
        pytest.skip("latent attention in a pattern came with megatron-core 0.19")
    job = replace(job, max_tokens=LONGEST + 10)
    check(folded(size, layout, job), oracle(job), FP32_INSIDE if job.config == MOE else FP64)


STATES = Job(pattern="G-G*", way="weighted sum", config=DELTA_NET, double=True, max_tokens=LONGEST + 10)
TP2 = Layout(tp=2)


@pytest.mark.skipif(not HAS_DELTA_NET, reason="Gated DeltaNet follows a tree since megatron-core 0.19")
@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        # Upstream's own gradient of a norm over heads has one rank's heads without sequence parallelism.
        pytest.param(2, TP2, STATES, id="tp2", marks=pytest.mark.ci),
        pytest.param(2, TP2_SP, STATES, id="tp2-sp"),
        pytest.param(2, PP2, replace(STATES, pattern="G-G|*"), id="pp2"),
        pytest.param(2, Layout(pp=2, vpp=2), replace(STATES, pattern="G|-|G|*"), id="pp2-vpp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(), STATES, id="dp2", marks=pytest.mark.ci),
        pytest.param(
            2, TP2_SP, replace(STATES, config=DELTA_NET + RECOMPUTE), id="tp2-sp-recompute", marks=pytest.mark.ci
        ),
        pytest.param(
            2, Layout(ep=2), replace(STATES, pattern="GE*E", config=DELTA_NET + MOE), id="ep2", marks=pytest.mark.ci
        ),
        pytest.param(
            2, TP2_SP, replace(STATES, pattern=None, config=DELTA_NET + VARIANT), id="gpt-tp2-sp", marks=pytest.mark.ci
        ),
        pytest.param(
            2, PP2, replace(STATES, pattern=None, config=DELTA_NET + VARIANT), id="gpt-pp2", marks=pytest.mark.ci
        ),
    ],
)
def test_states_in_every_layout(size: int, layout: Layout, job: Job) -> None:
    check(folded(size, layout, job), oracle(job), FP32_INSIDE if job.pattern == "GE*E" else FP64)


SPACES = replace(STATES, pattern="M-M*", config=MAMBA)


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, TP2, SPACES, id="tp2", marks=pytest.mark.ci),
        pytest.param(2, TP2_SP, replace(SPACES, config=MAMBA + RECOMPUTE), id="tp2-sp-recompute"),
        pytest.param(2, TP2_SP, SPACES, id="tp2-sp", marks=pytest.mark.ci),
        pytest.param(2, PP2, replace(SPACES, pattern="M-M|*"), id="pp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(pp=2, vpp=2), replace(SPACES, pattern="M|-|M|*"), id="pp2-vpp2"),
        pytest.param(2, Layout(), SPACES, id="dp2", marks=pytest.mark.ci),
        pytest.param(
            2, Layout(ep=2), replace(SPACES, pattern="ME*E", config=MAMBA + MOE), id="ep2", marks=pytest.mark.ci
        ),
    ],
)
def test_state_spaces_in_every_layout(size: int, layout: Layout, job: Job) -> None:
    check(folded(size, layout, job), oracle(job), FP32_INSIDE if job.pattern == "ME*E" else FP64)


@pytest.mark.parametrize("max_tokens", [pytest.param(None, marks=pytest.mark.ci), 24], ids=["at once", "in parts"])
def test_state_spaces_fold_inside_the_model(max_tokens: int | None) -> None:
    job = InsideJob(pattern=SPACES.pattern, config=SPACES.config, double=True, check_first=True, max_tokens=max_tokens)
    check(inside(2, TP2_SP, job), oracle(SPACES), FP64)


CHOOSES = replace(STATES, pattern="D-DD", config=LATENT + SPARSE)
GPT = replace(CHOOSES, pattern=None, config=LATENT + SPARSE + shallow(PP2))


@pytest.mark.skipif(not HAS_SPARSE_ATTENTION, reason="sparse attention follows a tree since megatron-core 0.19")
@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, TP2_SP, GPT, id="gpt-tp2-sp"),
        pytest.param(2, PP2, replace(GPT, config=GPT.config + RECOMPUTE), id="gpt-pp2-recompute", marks=pytest.mark.ci),
        pytest.param(
            2, TP2_SP, replace(CHOOSES, config=LATENT + SPARSE + RECOMPUTE), id="tp2-sp", marks=pytest.mark.ci
        ),
        pytest.param(2, PP2, replace(CHOOSES, pattern="D-|DD"), id="pp2", marks=pytest.mark.ci),
    ],
)
def test_sparse_attention_in_every_layout(size: int, layout: Layout, job: Job) -> None:
    check(folded(size, layout, job), oracle(job), FP64)


@pytest.mark.parametrize(
    ("size", "layout", "pattern", "reads"),
    [
        pytest.param(2, TP2_SP, "*-*-", "labels", id="tp2-sp"),
        pytest.param(2, PP2, "*-*|-", "logprobs", id="pp2"),
        pytest.param(2, Layout(pp=2, vpp=2), "*|-|*|-", "logits", id="pp2-vpp2", marks=pytest.mark.ci),
    ],
)
def test_folding_inside_the_model(size: int, layout: Layout, pattern: str, reads: str) -> None:
    job = InsideJob(pattern=pattern, reads=reads, check_first=True)
    check(inside(size, layout, job), unfolded_oracle(layout, pattern="*-*-"), FP64)


@pytest.mark.parametrize(
    ("layout", "pattern"), [(PP2, "*-*|-"), (Layout(pp=2, vpp=2), "-|-|*|*")], ids=["a stage", "a chunk of all stages"]
)
def test_layers_without_attention_fold_when_the_others_do(layout: Layout, pattern: str) -> None:
    job = InsideJob(pattern=pattern, unlike=True, check_first=True)
    check(inside(2, layout, job), unfolded_oracle(layout, pattern=pattern.replace("|", ""), unlike=True), FP64)


@pytest.mark.skipif(not HAS_DELTA_NET, reason="Gated DeltaNet follows a tree since megatron-core 0.19")
@pytest.mark.parametrize("max_tokens", [pytest.param(None, marks=pytest.mark.ci), 24], ids=["at once", "in parts"])
def test_states_fold_inside_the_model(max_tokens: int | None) -> None:
    job = InsideJob(pattern=STATES.pattern, config=STATES.config, double=True, check_first=True, max_tokens=max_tokens)
    check(inside(2, TP2_SP, job), oracle(STATES), FP64)


@pytest.mark.skipif(not HAS_SPARSE_ATTENTION, reason="sparse attention follows a tree since megatron-core 0.19")
@pytest.mark.parametrize(
    ("model", "max_tokens"),
    [pytest.param(CHOOSES, None, marks=pytest.mark.ci), (GPT, 24)],
    ids=["hybrid", "gpt in parts"],
)
def test_sparse_attention_folds_inside_the_model(model: Job, max_tokens: int | None) -> None:
    job = InsideJob(pattern=model.pattern, config=model.config, double=True, max_tokens=max_tokens)
    check(inside(2, TP2_SP, job), oracle(model), FP64)
