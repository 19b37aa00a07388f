"""A folded step equals the stock model on unfolded samples: all kinds of models, layouts and cuts of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch
from harness.folded_jobs import VOCAB, Job, packed_gradients, unfolded_gradients
from harness.folded_runs import (
    BALANCED,
    DELTA_NET,
    FP32,
    FP32_INSIDE,
    FP64,
    LATENT,
    LONGEST,
    MAMBA,
    MOE,
    SAMPLES,
    SPARSE,
    check,
    folded,
    oracle,
)
from harness.layouts import LAYOUTS, RECOMPUTE, in_pipeline, lacking, shallow
from harness.weights import assemble
from harness.worlds import Layout, world

from mcore_prefix_tree import fold
from mcore_prefix_tree.plan import plan_step

TWO_LAYERS = shallow(Layout())
ABOVE = {"max_tokens": 20, "over_budget": "carry"}
DEPTHS = (("mtp_num_layers", 2), ("mtp_loss_scaling_factor", 0.5))
DELTA_GPT = (*DELTA_NET, ("experimental_attention_variant", "gated_delta_net"), ("linear_attention_freq", 2))


@dataclass(frozen=True)
class Model:
    """A job, and the layouts in which it runs by default, in CI and rarely; ``cut`` are those of trees in chunks.

    A layout is followed by what else the folded run has, as in ``tp2+recompute``.
    """

    job: Job
    quick: str = ""
    ci: str = ""
    slow: str = ""
    cut: str = ""
    cut_in_ci: str = ""

    def cases(self, name: str) -> Iterator[Any]:
        for layouts, is_cut, marks in (
            (self.quick, False, ()),
            (self.ci, False, pytest.mark.ci),
            (self.slow, False, pytest.mark.slow),
            (self.cut, True, ()),
            (self.cut_in_ci, True, pytest.mark.ci),
        ):
            for layout in layouts.split():
                id_ = f"{name}-{layout}{'-in chunks' * is_cut}"
                yield pytest.param(self.job, *layout.partition("+")[::2], is_cut, id=id_, marks=marks)


EXACT = Job(double=True)
PATTERN = replace(EXACT, way="weighted sum")
MODELS = {
    "dense": Model(
        Job(),
        quick="tp2-sp pp2-vpp2 dp2 tp2-sp-pp2-vpp2",
        ci="single tp2 pp2 dp4 tp2+recompute tp2+reference",
        slow="tp2-pp2 tp2-dp2",
        cut="pp2+sum tp2-sp+recompute+logprobs",
        cut_in_ci="dp2 pp2-vpp2",
    ),
    "tied": Model(Job(share_embeddings=True), ci="pp2"),
    "qk layernorm": Model(Job(config=(("qk_layernorm", True),)), ci="tp2"),
    "latent": Model(
        replace(EXACT, config=LATENT), quick="tp2-sp", ci="pp2", cut="tp2-sp", cut_in_ci="tp2-sp+recompute pp2"
    ),
    "experts": Model(Job(config=MOE), quick="tp2-sp", ci="ep2", cut_in_ci="ep2"),
    # The second of two steps, with the biases that the first has updated, and the losses of experts.
    "balanced": Model(
        Job(config=BALANCED, steps=1),
        quick="single tp2-sp",
        ci="dp2 ep2 pp2",
        cut="ep2",
        cut_in_ci="pp2 tp2-sp+recompute",
    ),
    "pattern": Model(
        Job(pattern="*-*-", way="weighted sum"),
        quick="tp2-sp pp2+tied",
        ci="tp2+recompute pp2+recompute pp2+logits pp2-vpp2 dp2",
    ),
    "pattern, experts": Model(Job(pattern="*E*E", way="weighted sum", config=MOE), quick="tp2-sp", ci="pp2 ep2"),
    "pattern, latent": Model(Job(pattern="+-+-", way="weighted sum", config=LATENT), quick="pp2"),
    # Upstream's own gradient of a norm over heads has one rank's heads without sequence parallelism.
    "delta net": Model(
        replace(PATTERN, pattern="G-G*", config=DELTA_NET),
        quick="tp2-sp pp2",
        ci="tp2 pp2-vpp2 dp2 tp2-sp+recompute",
    ),
    "delta net, experts": Model(replace(PATTERN, pattern="GE*E", config=DELTA_NET + MOE), ci="ep2"),
    "delta net, GPT": Model(replace(PATTERN, config=DELTA_GPT), ci="tp2-sp pp2"),
    "Mamba": Model(
        replace(PATTERN, pattern="M-M*", config=MAMBA), quick="tp2-sp+recompute pp2-vpp2", ci="tp2 tp2-sp pp2 dp2"
    ),
    "Mamba, experts": Model(replace(PATTERN, pattern="ME*E", config=MAMBA + MOE), ci="ep2"),
    "Mamba, delta net": Model(
        replace(PATTERN, pattern="MG*G", config=DELTA_NET + MAMBA),
        cut="tp2-sp+recompute pp2",
        cut_in_ci="dp2 pp2-vpp2",
    ),
    "sparse": Model(replace(PATTERN, config=LATENT + SPARSE), quick="tp2-sp", ci="pp2+recompute"),
    "pattern, sparse": Model(
        replace(PATTERN, pattern="D-DD", config=LATENT + SPARSE),
        ci="tp2-sp+recompute pp2",
        cut="tp2-sp",
        cut_in_ci="pp2",
    ),
    # Above the budget, a row reads hidden states of other chunks, on the last stage.
    "depths": Model(
        replace(PATTERN, config=DEPTHS),
        quick="tp2 tp2-sp+recompute pp2",
        ci="pp2-vpp2 dp2",
        cut="tp2-sp+recompute pp2",
        cut_in_ci="pp2-vpp2",
    ),
    "depths, experts": Model(replace(PATTERN, config=DEPTHS + MOE), ci="tp2-sp ep2"),
    "depths of a pattern": Model(
        replace(PATTERN, pattern="*-*-/*-/*-", config=DEPTHS),
        quick="tp2-sp+recompute",
        ci="tp2 pp2 pp2-vpp2 dp2",
        cut_in_ci="dp2",
    ),
    "depths of Mamba": Model(replace(PATTERN, pattern="M-*-/M-/M-", config=DEPTHS + MAMBA), ci="tp2-sp"),
    "depths of delta net": Model(
        replace(PATTERN, pattern="G-*-/G-/G-", config=DEPTHS + DELTA_NET), quick="pp2", cut_in_ci="pp2"
    ),
}
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {"share_embeddings": True},
    "reference": {"backend": "reference"},
    "logits": {"way": "logits"},
    "logprobs": {"way": "logprobs"},
    "sum": {"way": "weighted sum"},
}


def test_the_batch_is_a_hard_one() -> None:
    layout = fold(SAMPLES)
    depth = [0] * layout.num_nodes
    for node, parent in enumerate(layout.node_parent.tolist()):
        depth[node] = depth[parent] + 1 if parent >= 0 else 1
    assert max(depth) >= 4
    assert layout.fold_ratio > 1.5
    assert layout.num_trees >= 4
    assert max(sample.tokens.max() for sample in SAMPLES) < VOCAB
    plan = plan_step(SAMPLES, dp_size=2, **ABOVE)
    assert plan.carrying is not None
    passes = [rank.carried_tokens for rank in plan.carrying]
    assert min(passes) != max(passes), "ranks carry unlike amounts"


@pytest.mark.parametrize(
    ("job", "name", "more", "is_cut"), [case for name, model in MODELS.items() for case in model.cases(name)]
)
def test_every_layout(job: Job, name: str, more: str, is_cut: bool) -> None:
    size, layout = LAYOUTS[name]
    if reason := lacking(job, layout):
        pytest.skip(reason)
    words = more.split("+") if more else []
    if job.pattern is None:
        job = replace(job, config=(*shallow(layout), *job.config))
    job = replace(job, share_embeddings=job.share_embeddings or "tied" in words)
    given = replace(job, pattern=in_pipeline(job.pattern, layout), max_tokens=LONGEST + 10)
    if "recompute" in words:
        given = replace(given, config=given.config + RECOMPUTE)
    for word in words:
        given = replace(given, **CHANGES.get(word, {}))
    given = replace(given, **ABOVE) if is_cut else given
    limit = FP32_INSIDE if "num_moe_experts" in dict(job.config) else FP64
    check(folded(size, layout, given), oracle(replace(job, way="logits")), limit)


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
