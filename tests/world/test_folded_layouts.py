"""A folded step equals the stock model on unfolded samples, in every parallel layout and for any cut of the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from harness.folded_jobs import VOCAB, Job, packed_gradients, unfolded_gradients
from harness.folded_runs import BALANCED, FP32, FP32_INSIDE, FP64, LATENT, LONGEST, MOE, SAMPLES, check, folded, oracle
from harness.layouts import LAYOUTS, in_layouts, shallow
from harness.weights import assemble
from harness.worlds import Layout, world
from megatron.core.transformer import multi_latent_attention

from mcore_prefix_tree import fold

# Its loss compares samples: the stock model has those of a micro-batch in one row.
GLOBAL = Job(
    config=(
        ("num_layers", 2),
        *MOE[:-1],
        ("moe_router_load_balancing_type", ["global_aux_loss"]),
        ("moe_aux_loss_coeff", [0.5]),
        ("moe_router_score_function", "sigmoid"),
    ),
    double=True,
    positions="learned_absolute",
    max_tokens=LONGEST + 10,
)
TWO_LAYERS = shallow(Layout())
RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))


def test_the_batch_is_a_hard_one() -> None:
    layout = fold(SAMPLES)
    depth = [0] * layout.num_nodes
    for node, parent in enumerate(layout.node_parent.tolist()):
        depth[node] = depth[parent] + 1 if parent >= 0 else 1
    assert max(depth) >= 4
    assert layout.fold_ratio > 1.5
    assert layout.num_trees >= 4
    assert max(sample.tokens.max() for sample in SAMPLES) < VOCAB


@in_layouts(
    "tp2-sp", "pp2-vpp2", "dp2", "tp2-sp-pp2-vpp2", ci=["single", "tp2", "pp2", "dp4"], slow=["tp2-pp2", "tp2-dp2"]
)
def test_every_layout(size: int, layout: Layout) -> None:
    job = Job(max_tokens=LONGEST + 10, config=shallow(layout))
    check(folded(size, layout, job), oracle(job), FP64)


@pytest.mark.parametrize("max_tokens", [LONGEST, 2 * LONGEST, 10_000])
def test_the_budget_changes_nothing(max_tokens: int) -> None:
    job = Job(max_tokens=max_tokens, config=TWO_LAYERS)
    check(folded(1, Layout(), job), oracle(job), FP64)


def test_the_order_of_samples_changes_nothing() -> None:
    shuffled = [SAMPLES[i] for i in torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(0)).tolist()]
    job = Job(max_tokens=LONGEST, config=TWO_LAYERS)
    check(folded(2, Layout(), job, shuffled), oracle(job), FP64)


def test_a_rank_without_samples() -> None:
    """Four replicas, two samples that share nothing: two ranks compute padding, and no gradient changes."""
    two = [SAMPLES[0], SAMPLES[-2]]
    job = Job(max_tokens=LONGEST, config=TWO_LAYERS)
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, two, layout=Layout())
    check(folded(4, Layout(), job, two), (loss, assemble(parts)), FP64)


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, Layout(pp=2), Job(share_embeddings=True), id="tied-pp2", marks=pytest.mark.ci),
        pytest.param(
            2, Layout(tp=2), Job(config=(("qk_layernorm", True),)), id="qk-layernorm-tp2", marks=pytest.mark.ci
        ),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), Job(config=LATENT), id="latent-tp2-sp"),
        pytest.param(2, Layout(pp=2), Job(config=LATENT), id="latent-pp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), Job(config=MOE), id="moe-tp2-sp"),
        pytest.param(2, Layout(ep=2), Job(config=MOE), id="moe-ep2", marks=pytest.mark.ci),
        pytest.param(1, Layout(), Job(config=BALANCED, steps=1), id="balanced"),
        pytest.param(2, Layout(), Job(config=BALANCED, steps=1), id="balanced-dp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), Job(config=BALANCED), id="balanced-tp2-sp"),
        pytest.param(2, Layout(ep=2), Job(config=BALANCED), id="balanced-ep2", marks=pytest.mark.ci),
        pytest.param(2, Layout(pp=2), Job(config=BALANCED), id="balanced-pp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2), Job(backend="reference"), id="reference-tp2", marks=pytest.mark.ci),
        pytest.param(2, Layout(tp=2), Job(config=RECOMPUTE), id="full-recompute-tp2", marks=pytest.mark.ci),
    ],
)
def test_other_models(size: int, layout: Layout, job: Job) -> None:
    if job.config == LATENT and layout.sequence_parallel and multi_latent_attention.Linear is None:
        pytest.skip("this megatron-core takes projections that all ranks hold whole only with TransformerEngine")
    limit = FP32_INSIDE if job.config in (MOE, BALANCED) else FP64
    job = replace(job, max_tokens=2 * LONGEST, config=(*TWO_LAYERS, *job.config))
    check(folded(size, layout, job), oracle(job), limit)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("tp2-sp", ()),
        ("dp2", ()),
        pytest.param("tp2-sp", RECOMPUTE, id="tp2-sp-recompute", marks=pytest.mark.ci),
        pytest.param("ep2", RECOMPUTE, id="ep2-recompute", marks=pytest.mark.ci),
        pytest.param("pp2", (), marks=pytest.mark.ci),
    ],
)
def test_the_global_balancing_loss(name: str, recompute: tuple[tuple[str, object], ...]) -> None:
    """It equals the stock model's on the same micro-batches, of several ranks with other numbers of tokens."""
    size, layout = LAYOUTS[name]
    replicas, job = layout.dp(size), replace(GLOBAL, config=GLOBAL.config + recompute)
    results = world(replicas).run(packed_gradients, Layout(), GLOBAL, SAMPLES, layout=Layout())
    expected = results[0][0], assemble(chain.from_iterable(parts for _, parts in results))
    check(folded(size, layout, job), expected, FP64)


def test_the_distributed_optimizer() -> None:
    """After two steps the weights are those of training without it on unfolded samples, in fp32."""
    job = Job(dtype=torch.float32, steps=2, distributed_optimizer=True, max_tokens=LONGEST, config=TWO_LAYERS)
    check(folded(2, Layout(), job), oracle(job), FP32)


def test_fp32() -> None:
    job = Job(dtype=torch.float32, max_tokens=2 * LONGEST, config=TWO_LAYERS)
    check(folded(2, Layout(tp=2), job), oracle(job), FP32)


@pytest.mark.ci
def test_the_same_bits_twice() -> None:
    first, second = (folded(2, Layout(tp=2), Job(max_tokens=LONGEST, config=TWO_LAYERS)) for _ in range(2))
    assert first[0] == second[0]
    assert all(torch.equal(tensor, second[1][name]) for name, tensor in first[1].items())
