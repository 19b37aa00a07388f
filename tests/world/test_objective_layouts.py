"""A folded step of an objective equals the same formulas with the stock model on unfolded samples, in every layout.

The oracles of the formulas are those of the objectives' own unit tests, over the stock model's log-probabilities and
values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness.folded_jobs import branching_samples
from harness.folded_runs import LATENT, SPARSE
from harness.layouts import every_way, in_layouts, shallow
from harness.marks import quick
from harness.weights import assemble
from harness.worlds import Layout, world
from objective_jobs import (
    Job,
    Outcome,
    folded_step,
    make_samples,
    stock_distributions,
    stock_values,
    teacher_rows,
    unfolded_step,
    value_rows,
)

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, HAS_SPARSE_ATTENTION, NEEDS_DEPTHS

FP64 = 1e-12
# Both runs are off by rounding, and one batch is one draw of it: use the limits of verify.
FACTOR = 3.0
GRPO = Job(
    name="grpo", options=(("kl_coef", 0.05), ("entropy_coef", 0.01), ("clip_eps_low", 0.05), ("clip_eps_high", 0.05))
)
DPO = Job(name="dpo")
GSPO = Job(name="gspo")
IPO = Job(name="ipo")
KTO = Job(name="kto", options=(("desirable_weight", 1.3), ("beta", 0.4)))
BY_GROUP = [
    Job(name="grpo", options=(*GRPO.options, ("normalise", "group"))),
    Job(name="sft", options=(("normalise", "group"),)),
]
CRITIC = Job(name="critic", options=(("gamma", 0.9), ("lam", 0.8), ("normalise", "sample")))
REWARD_MODEL = Job(name="reward_model", options=(("center_coef", 0.01),))
FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
DISTILL = Job(name="distill", options=(("divergence", "jsd"), ("jsd_beta", 0.3), ("normalise", "sample")))
TAUGHT = Job(
    name="distill",
    options=(("divergence", "jsd"), ("jsd_beta", 0.3), ("normalise", "sample"), ("teacher", "full")),
    teacher_config=(("hidden_size", 48), ("ffn_hidden_size", 64), ("num_layers", 4)),
)
OBJECTIVES = [pytest.param(job, id=job.name) for job in (GRPO, DPO, CRITIC, REWARD_MODEL, DISTILL)]
IDS = ["grpo", "critic", "dpo", "reward_model", "distill", "distill from a model"]
MOE = (
    ("num_moe_experts", 4),
    ("moe_ffn_hidden_size", 32),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "none"),
)
DEEP = (("mtp_num_layers", 2), ("mtp_loss_scaling_factor", 0.5))
DEPTHS = replace(GRPO, double=True, config=DEEP)
WATCHED = {
    "grpo": {"ratio", "clip_fraction", "kl", "kl_old", "entropy"},
    "dpo": {"accuracy", "margin"},
    "critic": {"value", "return", "value_error", "clip_fraction"},
    "reward_model": {"accuracy", "margin", "reward_chosen", "reward_rejected"},
    "distill": {"jsd"},
}

SAMPLES = make_samples()
LONGEST = max(map(len, SAMPLES))
PAIR = max(
    len({sample.tokens[: t + 1].tobytes() for sample in SAMPLES[i : i + 2] for t in range(len(sample))})
    for i in range(0, len(SAMPLES), 2)
)

Gradients = Mapping[str, torch.Tensor]


@functools.cache
def _expected(job: Job, count: int, rounded: bool) -> tuple[float, Gradients]:
    ((loss, parts),) = world(1).run(unfolded_step, job, SAMPLES[:count], rounded, layout=Layout())
    return loss, assemble(parts)


def expected(job: Job, count: int = len(SAMPLES), *, rounded: bool = False) -> tuple[float, Gradients]:
    """Run once for all the ways of cutting the batch."""
    return _expected(replace(job, max_tokens=0, fused_head=False, over_budget="repeat", in_loop=False), count, rounded)


def folded(size: int, layout: Layout, job: Job, order: Sequence[int]) -> tuple[list[Outcome], Gradients]:
    samples = [SAMPLES[index] for index in order]
    results = world(size).run(folded_step, layout, job, samples, layout=layout)
    return [outcome for outcome, _ in results], assemble(itertools.chain.from_iterable(parts for _, parts in results))


def errors(actual: Gradients, wanted: Gradients) -> dict[str, float]:
    assert actual.keys() == wanted.keys()
    return {
        name: float((actual[name].double() - tensor.double()).norm() / tensor.double().norm())
        for name, tensor in wanted.items()
    }


def check(
    size: int, layout: Layout, job: Job, *, order: Sequence[int] = range(len(SAMPLES)), limit: float = FP64
) -> list[Outcome]:
    job = replace(job, config=(*shallow(layout), *job.config))
    outcomes, gradients = folded(size, layout, job, order)
    loss, wanted = expected(job, len(order))
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(loss, rel=limit)
    for name, error in errors(gradients, wanted).items():
        assert error <= limit, f"{name}: {error:.2e}"
    return outcomes


def test_the_batch_is_a_hard_one() -> None:
    assert PAIR < 2 * LONGEST
    assert sum(len(sample) for sample in SAMPLES) > 3 * LONGEST
    assert len({sample.signals.group for sample in SAMPLES}) >= 3


EVERY = [
    *OBJECTIVES,
    pytest.param(GSPO, id="gspo"),
    pytest.param(KTO, id="kto"),
    pytest.param(TAUGHT, id="distill from a model"),
]


MASKED = [replace(job, masked=True) for job in (GRPO, DPO, KTO, CRITIC, BY_GROUP[1], Job(name="sft"), GSPO)]


@pytest.mark.parametrize(
    "job",
    [*quick(*MASKED[:2], of=MASKED[:-1]), pytest.param(MASKED[-1], marks=pytest.mark.ci)],
    ids=lambda job: job.name,
)
def test_sampling_masks_equal_unfolded_samples(job: Job) -> None:
    """Fused and not, on unequal ranks, tensor- and pipeline-parallel ones, in several micro-batches and in one."""
    for size, layout, fused, most in (
        (2, Layout(), True, max(LONGEST, PAIR) + 10),
        (2, Layout(tp=2, sequence_parallel=True), True, max(LONGEST, PAIR) + 10),
        (2, Layout(tp=2), False, 10_000),
        (2, Layout(pp=2), True, max(LONGEST, PAIR) + 10),
        (1, Layout(), True, 10_000),
    ):
        check(size, layout, replace(job, max_tokens=most, fused_head=fused))


# By default, each question to the last stage on unequal ranks or in a model that is cut; in CI each objective.
QUICK = {
    "dp2": {"grpo", "reward_model", "kto"},
    "tp2-sp": {"grpo", "critic"},
    "pp2-vpp2": {"dpo", "distill from a model"},
}
IN_CI = {
    "dp2": {one.id for one in EVERY},
    "tp2-sp": {"distill", "distill from a model"},
    "pp2-vpp2": {"reward_model"},
    "tp2": {"grpo"},
    "pp2": {"critic"},
    "single": set(),
}


@pytest.mark.parametrize(
    ("size", "layout", "job"), every_way({one.id: one.values[0] for one in EVERY}, quick=QUICK, ci=IN_CI)
)
def test_every_layout(size: int, layout: Layout, job: Job) -> None:
    outcomes = check(size, layout, replace(job, max_tokens=max(LONGEST, PAIR) + 10))
    assert outcomes[0].micro_batches > 1
    if size == 2 and layout == Layout():
        assert outcomes[0].tokens_here != outcomes[1].tokens_here, "unequal ranks"


OFF_POLICY = (("tis_cap", 1.1), ("tis_level", "sequence"), ("off_policy_mask", 0.01))
ON_POLICY = (("on_policy", True), ("kl_coef", 0.05), ("kl_importance", "sequence"), ("entropy_coef", 0.01))
# Losses of whole samples, of a running teacher, and of sampling masks, of trees that are cut into chunks.
CUT = {
    "gspo": GSPO,
    "dpo": replace(DPO, fused_head=False),
    "kto": replace(KTO, config=FULL),
    "reward_model": REWARD_MODEL,
    "importance of sequences": Job(name="grpo", options=OFF_POLICY),
    "an entropy and a divergence of sequences": Job(name="grpo", options=ON_POLICY),
    "ipo": replace(IPO, config=FULL),
    "a divergence from a model": TAUGHT,
    "sampling masks": replace(GSPO, masked=True),
    "sampling masks of pairs": replace(DPO, masked=True, fused_head=False),
    "sampling masks of values": replace(CRITIC, masked=True),
}
CUT_QUICK = {"dp2": {"dpo", "importance of sequences"}, "tp2-sp": {"kto"}, "pp2": {"gspo", "sampling masks"}}
CUT_IN_CI = {
    "dp2": {"reward_model", "sampling masks of values", "a divergence from a model"},
    "tp2-sp": {"sampling masks of pairs", "an entropy and a divergence of sequences"},
    "pp2": {"sampling masks"},
    "pp2-vpp2": {"dpo", "a divergence from a model"},
    "tp2-pp2": set(),
    "single": set(),
}
IN_LOOP = {f"{name} in Megatron-LM's loop": replace(job, in_loop=True) for name, job in CUT.items()}
LOOP_QUICK = {"pp2": {"gspo in Megatron-LM's loop"}}
LOOP_IN_CI = {
    "pp2-vpp2": {"dpo in Megatron-LM's loop"},
    "tp2-pp2": {"gspo in Megatron-LM's loop"},
    "pp2-dp2": {"dpo in Megatron-LM's loop"},
    "pp2": set(),
    "single": set(),
}


@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [*every_way(CUT, quick=CUT_QUICK, ci=CUT_IN_CI), *every_way(IN_LOOP, quick=LOOP_QUICK, ci=LOOP_IN_CI)],
)
def test_trees_in_chunks(size: int, layout: Layout, job: Job) -> None:
    job = replace(job, config=(*shallow(layout), *job.config))
    outcomes = check(size, layout, replace(job, max_tokens=LONGEST // 2, over_budget="carry"))
    (whole,) = check(1, Layout(), replace(job, max_tokens=10_000, in_loop=False))
    assert outcomes[0].carried_tokens > 0
    for outcome in outcomes:
        assert outcome.metrics == pytest.approx(whole.metrics, rel=1e-10)
    if size == 2 and layout == Layout():
        assert outcomes[0].tokens_here != outcomes[1].tokens_here, "unequal ranks"


def test_half_precision_in_the_loop() -> None:
    """To the bit what the same step is outside it: logits are read in fp32 before the step, too."""
    half = replace(GSPO, dtype=torch.bfloat16, fused_head=False, max_tokens=LONGEST // 2, over_budget="carry")
    outside, inside = (
        folded(2, Layout(pp=2), replace(half, in_loop=in_loop), range(len(SAMPLES))) for in_loop in (False, True)
    )
    assert inside[0] == outside[0]
    assert set(errors(inside[1], outside[1]).values()) == {0.0}


@pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}")
@pytest.mark.parametrize(
    ("size", "layout", "job"),
    [
        pytest.param(2, Layout(tp=2, sequence_parallel=True), replace(DEPTHS, config=DEEP + FULL), id="tp2-sp"),
        pytest.param(2, Layout(pp=2, vpp=2), replace(DEPTHS, name="dpo", options=()), id="dpo-pp2-vpp2"),
        pytest.param(2, Layout(), DEPTHS, id="dp2", marks=pytest.mark.ci),
    ],
)
def test_depths_of_multi_token_prediction_have_their_own_mean(size: int, layout: Layout, job: Job) -> None:
    outcomes = check(size, layout, replace(job, max_tokens=max(LONGEST, PAIR) + 10))
    assert outcomes[0].micro_batches > 1


@pytest.mark.parametrize(
    "job", quick(BY_GROUP[0], IPO, of=[*BY_GROUP, IPO]), ids=["grpo by group", "sft by group", "ipo"]
)
def test_groups_that_are_split_over_ranks(job: Job) -> None:
    outcomes = check(2, Layout(), replace(job, max_tokens=max(LONGEST, PAIR) + 10))
    assert outcomes[0].groups_here & outcomes[1].groups_here
    assert outcomes[0].tokens_here != outcomes[1].tokens_here, "unequal ranks"


@pytest.mark.parametrize("job", quick(GRPO, of=[GRPO, CRITIC, DPO, REWARD_MODEL, DISTILL]), ids=IDS[:-1])
def test_gradient_and_metrics_do_not_depend_on_cut_and_order(job: Job) -> None:
    order = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(0)).tolist()
    narrow, wide, shuffled, unfused = (
        check(size, Layout(), replace(job, max_tokens=max_tokens, fused_head=fused), order=own)[0]
        for size, max_tokens, fused, own in (
            (1, max(LONGEST, PAIR), True, range(len(SAMPLES))),
            (1, 10_000, True, range(len(SAMPLES))),
            (2, 2 * LONGEST, True, order),
            (1, 2 * LONGEST, False, range(len(SAMPLES))),
        )
    )
    assert narrow.micro_batches > wide.micro_batches == 1
    for other in (wide, shuffled, unfused):
        assert other.metrics == pytest.approx(narrow.metrics, rel=1e-10)
    assert WATCHED[job.name] <= narrow.metrics.keys()
    if "clip_fraction" in narrow.metrics:
        assert 0 < narrow.metrics["clip_fraction"] < 1, "or this test is too easy"


@pytest.mark.parametrize(
    "job",
    [DPO, Job(name="grpo", options=(("advantage", "reward"),)), CRITIC, REWARD_MODEL, DISTILL, TAUGHT],
    ids=["dpo", "policy", "critic", "reward_model", "distill", "distill from a model"],
)
def test_a_rank_without_samples(job: Job) -> None:
    """Two replicas, and one pair or one sample: the other computes padding."""
    outcomes = check(2, Layout(), job, order=range(2 if job in (DPO, REWARD_MODEL) else 1))
    assert min(outcome.tokens_here for outcome in outcomes) == 0


BALANCED = (*MOE[:-1], ("moe_router_load_balancing_type", "aux_loss"), ("moe_router_score_function", "sigmoid"))
BALANCED = (*BALANCED, ("moe_router_dtype", "fp64"))
INDEXED = tuple((dict(LATENT) | dict(SPARSE) | {"dsa_indexer_use_sparse_loss": False}).items())
AUX, Z = (("moe_aux_loss_coeff", 0.5),), (("moe_z_loss_coeff", 0.1),)
# Layers with losses of their own: balancing, z-loss and, if there are indexers, their KL.
ADDED = (*BALANCED, *AUX, *Z, *(INDEXED if HAS_SPARSE_ATTENTION else ()))
NORMALISED = {
    f"{job.name} by {by}": replace(job, options=(*job.options, ("normalise", by)))
    for job, by in (
        *((Job(name="sft"), by) for by in ("token", "sample", "group")),
        *((GRPO, by) for by in ("token", "sample", "group", "sample_sum")),
        *((Job(name="critic"), by) for by in ("token", "sample")),
    )
} | {job.name: job for job in (GSPO, DPO, KTO, REWARD_MODEL, DISTILL)}


def check_added(size: int, layout: Layout, name: str, **cut: Any) -> list[Outcome]:
    job = replace(NORMALISED[name], config=ADDED, double=True)
    return check(size, layout, replace(job, **{"max_tokens": 2 * LONGEST} | cut))


@pytest.mark.parametrize("name", quick("sft by token", "grpo by sample", "dpo", "critic by token", of=NORMALISED))
def test_losses_of_layers_have_the_strength_of_their_coefficients(name: str) -> None:
    """Whatever an objective is divided by."""
    check_added(1, Layout(), name)


@pytest.mark.parametrize(
    ("size", "layout", "name"),
    [
        (2, Layout(), "grpo by sample"),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), "dpo", marks=pytest.mark.ci),
        pytest.param(2, Layout(pp=2), "critic by sample", marks=pytest.mark.ci),
        pytest.param(2, Layout(ep=2), "sft by group", marks=pytest.mark.ci),
    ],
)
def test_losses_of_layers_in_every_layout(size: int, layout: Layout, name: str) -> None:
    check_added(size, layout, name, max_tokens=max(LONGEST, PAIR) + 10)


@pytest.mark.parametrize("name", quick("gspo", of=["gspo", "sft by token", "sft by sample", "critic by sample"]))
def test_losses_of_layers_of_trees_in_chunks(name: str) -> None:
    outcomes = check_added(1, Layout(), name, max_tokens=LONGEST // 2, over_budget="carry")
    assert outcomes[0].carried_tokens > 0


@pytest.mark.ci
def test_bfloat16_is_about_as_close_to_the_truth_as_unfolded() -> None:
    """Against fp64 with the same weights, both in loss and in the worst parameter's gradient."""
    half = replace(GRPO, dtype=torch.bfloat16, max_tokens=2 * LONGEST)
    true_loss, truth = expected(GRPO, rounded=True)
    loss, unfolded = expected(half, rounded=True)
    outcomes, gradients = folded(2, Layout(tp=2), half, range(len(SAMPLES)))
    worst = max(errors(unfolded, truth).values())
    assert 1e-4 < worst < 0.3, "or the comparison says nothing"
    assert max(errors(gradients, truth).values()) <= FACTOR * worst
    of_loss = [abs(value / true_loss - 1) for value in (loss, outcomes[0].loss)]
    assert of_loss[1] <= max(FACTOR * of_loss[0], 2**-8)


SCORED = in_layouts("tp2-sp", slow=["pp2", "dp2"])


@SCORED
def test_scalar_head_values_equal_unfolded_samples(size: int, layout: Layout) -> None:
    samples = branching_samples(0)  # no value of it is so near 0 that rounding shows
    (stock,) = world(1).run(stock_values, samples, layout=Layout())
    for found in world(size).run(value_rows, layout, samples, max(map(len, samples)) + 10, layout=layout):
        for (scored, values, last), alone, sample in zip(found, stock, samples, strict=True):
            assert scored.tolist() == [t > 0 and weight != 0 for t, weight in enumerate(sample.loss_mask.tolist())]
            assert np.array_equal(np.isfinite(values), scored)
            np.testing.assert_allclose(values[1:][scored[1:]], alone[:-1][scored[1:]], rtol=1e-11)
            assert last == pytest.approx(alone[-1], rel=1e-11)


@SCORED
def test_teacher_rows_equal_unfolded_samples(size: int, layout: Layout) -> None:
    (stock,) = world(1).run(stock_distributions, SAMPLES, layout=Layout())
    k = 70  # more than a tensor-parallel rank's part of the vocabulary
    for found in world(size).run(teacher_rows, layout, SAMPLES, LONGEST + 10, k, layout=layout):
        for (scored, teacher), every, sample in zip(found, stock, SAMPLES, strict=True):
            assert scored.tolist() == [t > 0 and weight != 0 for t, weight in enumerate(sample.loss_mask.tolist())]
            top, ids = every[scored[1:]].topk(k, dim=1)
            assert teacher.token_ids[scored].tolist() == ids.tolist()
            torch.testing.assert_close(torch.from_numpy(teacher.logprobs[scored]).double(), top, rtol=1e-6, atol=0)
