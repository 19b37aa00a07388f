"""Trees in chunks under every parallel layout: the step is that of the stock model on separate samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.folded_jobs import Job
from harness.folded_runs import (
    BALANCED,
    DELTA_NET,
    FP32_INSIDE,
    FP64,
    LATENT,
    MAMBA,
    MOE,
    SAMPLES,
    SPARSE,
    check,
    folded,
    oracle,
)
from harness.layouts import LAYOUTS, shallow
from megatron.core.transformer import multi_latent_attention

from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.plan import plan_step

FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
BUDGET = 20


def test_trees_and_samples_are_above_the_budget() -> None:
    plan = plan_step(SAMPLES, max_tokens=BUDGET, dp_size=2, over_budget="carry")
    assert plan.carrying is not None
    assert max(map(len, SAMPLES)) > BUDGET
    passes = [rank.carried_tokens for rank in plan.carrying]
    assert min(passes) != max(passes), "ranks carry unlike amounts"


@pytest.mark.parametrize(
    ("name", "way", "settings"),
    [
        ("pp2", "weighted sum", ()),
        ("tp2-sp", "logprobs", FULL),
        pytest.param("dp2", "logits", (), marks=pytest.mark.ci),
        pytest.param("ep2", "logits", MOE, marks=pytest.mark.ci),
        pytest.param("pp2-vpp2", "logits", (), marks=pytest.mark.ci),
    ],
)
def test_layouts_train_as_separate_samples(name: str, way: str, settings: tuple[tuple[str, object], ...]) -> None:
    size, layout = LAYOUTS[name]
    job = Job(max_tokens=BUDGET, over_budget="carry", way=way, config=shallow(layout) + settings)
    expected = oracle(Job(config=shallow(layout) + (MOE if settings == MOE else ())))
    check(folded(size, layout, job), expected, FP32_INSIDE if settings == MOE else FP64)


@pytest.mark.skipif(not HAS_DELTA_NET, reason="Gated DeltaNet follows a tree since megatron-core 0.19")
@pytest.mark.parametrize(
    ("name", "pattern", "settings"),
    [
        ("tp2-sp", "MG*-", FULL),
        ("pp2", "GM|*G", ()),
        pytest.param("dp2", "MG*-", (), marks=pytest.mark.ci),
        pytest.param("pp2-vpp2", "G|M|*|G", (), marks=pytest.mark.ci),
    ],
)
def test_layouts_train_recurrent_layers(name: str, pattern: str, settings: tuple[tuple[str, object], ...]) -> None:
    size, layout = LAYOUTS[name]
    sizes = DELTA_NET + MAMBA
    job = Job(pattern=pattern, way="weighted sum", config=sizes + settings, double=True)
    expected = oracle(Job(pattern=pattern, config=sizes, double=True))
    check(folded(size, layout, replace(job, max_tokens=BUDGET, over_budget="carry")), expected, FP64)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("tp2-sp", ()), pytest.param("tp2-sp", FULL, marks=pytest.mark.ci), pytest.param("pp2", (), marks=pytest.mark.ci)],
)
def test_layouts_train_latent_attention(name: str, recompute: tuple[tuple[str, object], ...]) -> None:
    size, layout = LAYOUTS[name]
    if layout.sequence_parallel and multi_latent_attention.Linear is None:
        pytest.skip("this megatron-core takes projections that all ranks hold whole only with TransformerEngine")
    job = Job(config=shallow(layout) + LATENT, double=True)
    cut = replace(job, max_tokens=BUDGET, over_budget="carry", config=job.config + recompute)
    check(folded(size, layout, cut), oracle(job), FP64)


@pytest.mark.skipif(not HAS_SPARSE_ATTENTION, reason="sparse attention follows a tree since megatron-core 0.19")
@pytest.mark.parametrize("name", ["tp2-sp", pytest.param("pp2", marks=pytest.mark.ci)])
def test_layouts_train_sparse_attention(name: str) -> None:
    size, layout = LAYOUTS[name]
    pattern = "D-|D-" if name == "pp2" else "D-D-"
    job = Job(pattern=pattern, way="weighted sum", config=LATENT + SPARSE, double=True)
    check(folded(size, layout, replace(job, max_tokens=BUDGET, over_budget="carry")), oracle(job), FP64)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("ep2", ()), pytest.param("pp2", (), marks=pytest.mark.ci), pytest.param("tp2-sp", FULL, marks=pytest.mark.ci)],
)
def test_experts_are_balanced_as_of_separate_samples(name: str, recompute: tuple[tuple[str, object], ...]) -> None:
    """The second of two steps, with the biases that the first has updated, and the losses of experts."""
    size, layout = LAYOUTS[name]
    job = Job(config=shallow(layout) + BALANCED, steps=1)
    cut = replace(job, max_tokens=BUDGET, over_budget="carry", config=job.config + recompute)
    check(folded(size, layout, cut), oracle(job), FP32_INSIDE)
