"""Routes of samples under folding: scores and gradients are those of the stock model on each sample, routed alike."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from harness.packed_calls import packed, rows_of, spans
from harness.routes import KINDS, replaying, routers, with_routes
from harness.seam_models import EXPERTS, GRAPHS, RECOMPUTE, branching_samples, config_with, tiny_config, twins
from harness.seam_runs import FP32_INSIDE, assert_equal, batch_of, folded, score_alone, take_gradients, unfolded
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from mcore_prefix_tree import Sample, SampleError, fold
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.mcore import MicroBatch, RoutedPackedSeqParams, fold_inside, tree_forward
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.score_files import score_and_record
from mcore_prefix_tree.mcore.engine.scoring import ScoringStep
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.mcore.packed import fold_check
from mcore_prefix_tree.mcore.seam.routes import check_routes, check_sample_routes

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

ROUTED = EXPERTS | {"num_moe_experts": 8, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax first": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    "sigmoid, biases, groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}
FP64 = 1e-12
SHAPE = (3, 2, 8)
# What a trainer sets.
PARAMS = (
    "qkv_format",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
)


def step_stock(model: Any, samples: list[Sample], row_of: Any = lambda layer: layer) -> Any:
    """A step of samples that run by themselves, each with its routes."""
    return unfolded(model, samples, around=lambda sample: replaying(model, sample, row_of))


def step_folded(model: Any, samples: list[Sample]) -> Any:
    found = folded(model, batch_of(samples), entropy_weight=0.0)
    del found["entropy"]  # of last tokens, too, which have no routes
    return found


def models(**changes: Any) -> Any:
    stock, tree = twins(tiny_config(**ROUTED | changes))
    for model in (stock, tree):
        generator = torch.Generator().manual_seed(1)
        for router in routers(model):
            if router.expert_bias is not None:
                router.expert_bias.copy_(0.2 * torch.randn(8, generator=generator))
    return stock.train(), tree.train()


# Any two of a kind, a router and what is recomputed meet.
@pytest.mark.parametrize(
    ("kind", "router", "recompute"),
    [
        (kind, router, list(RECOMPUTE)[(row + column) % 3])
        for row, kind in enumerate(KINDS)
        for column, router in enumerate(ROUTERS)
    ],
)
def test_routes_are_those_of_each_sample(kind, router, recompute):
    stock, tree = models(**ROUTERS[router], **RECOMPUTE[recompute])
    samples = with_routes(branching_samples(), kind, SHAPE)
    assert_equal(step_folded(tree, samples), step_stock(stock, samples), FP32_INSIDE)


@pytest.mark.parametrize("kind", KINDS)
def test_routes_are_exact_if_upstream_keeps_its_scores(kind, monkeypatch):
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda values, dim, dtype=None: softmax(values, dim))
    stock, tree = models()
    samples = with_routes(branching_samples(), kind, SHAPE)
    assert_equal(step_folded(tree, samples), step_stock(stock, samples), FP64)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_oracle_is_upstreams_replay(recompute):
    """Its own objects, with their two actions, give what the oracle of the other tests gives."""
    stock, _ = models(**RECOMPUTE[recompute])
    samples = with_routes(branching_samples(), "one token", SHAPE)
    expected = step_stock(stock, samples)
    replays, rows, total = [RouterReplay() for _ in routers(stock)], [], 0.0
    try:
        for sample in samples:
            routes = torch.from_numpy(sample.signals.routes.ids.astype(np.int64))
            routes[-1] = torch.arange(2)  # a route that nothing depends on
            for router, replay in zip(routers(stock), replays, strict=True):
                router.router_replay = replay
                replay.clear_indices()
                replay.set_target_indices(routes[:, router.layer_number - 1])
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            logprob, _ = score_alone(stock, sample)
            for replay in replays:
                replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            loss = -(logprob * torch.as_tensor(sample.loss_mask[1:].copy())).sum()
            loss.backward()
            total += loss.detach()
            rows.append(logprob.detach())
    finally:
        RouterReplay.clear_global_router_replay_instances()
    assert_equal({"logprob": rows, "loss": total, "grads": take_gradients(stock)}, expected, FP64)


@pytest.mark.parametrize("layers", ["all", "with experts"])
def test_dense_layers_have_no_routes(layers):
    config = tiny_config(**ROUTED, moe_layer_freq=[0, 1, 1])
    stock, tree = twins(config, cpu_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False), config))
    assert len(routers(tree)) == 2
    if layers == "all":
        samples, row_of = with_routes(branching_samples(), "one token", SHAPE), lambda layer: layer
    else:
        samples, row_of = with_routes(branching_samples(), "one token", (2, 2, 8)), lambda layer: layer - 1
    assert_equal(step_folded(tree, samples), step_stock(stock, samples, row_of), FP32_INSIDE)


def test_a_batch_without_routes_leaves_upstreams_replay_in_place():
    _, tree = models(moe_enable_routing_replay=True)
    replays = [router.router_replay for router in routers(tree)]
    RouterReplay.clear_global_router_replay_instances()
    assert None not in replays
    step_folded(tree, with_routes(branching_samples(), "agree", SHAPE))
    assert [router.router_replay for router in routers(tree)] == replays


def test_recorded_routes_are_those_of_each_sample():
    """The oracle records with upstream's own objects; the last token has no route."""
    stock, tree = models(moe_router_score_function="sigmoid")
    samples, config = branching_samples(), tree.config
    folding = Folding(max_tokens=40, dp_size=1, cost_model=None, device=torch.device("cpu"), config=config)
    _, recorded = score_and_record(ScoringStep.plan(samples, folding), [tree], Logprobs(fused=False), config)
    replays = [RouterReplay() for _ in routers(stock)]
    RouterReplay.clear_global_router_replay_instances()
    for router, replay in zip(routers(stock), replays, strict=True):
        router.router_replay = replay
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    for sample, routes in zip(samples, recorded, strict=True):
        score_alone(stock, sample)
        wanted = torch.stack([replay.get_recorded_indices() for replay in replays], dim=1).numpy()
        assert np.array_equal(np.sort(routes.ids[:-1]), np.sort(wanted[:-1]))
        assert (routes.ids[-1] == -1).all()
    assert all(router.recorded is None for router in routers(tree))


def routed_call(samples: list[Sample], **padding: int) -> dict[str, Any]:
    """Packed rows with their routes; -5 stands where nothing is read."""
    call = packed(rows_of(samples), **padding)
    routes = np.full((call["input_ids"].shape[1], *SHAPE[:2]), -5)
    for span, sample in zip(spans(call), samples, strict=True):
        routes[span][:-1] = sample.signals.routes.ids[:-1]
    params = {one.name: getattr(call["packed_seq_params"], one.name) for one in fields(call["packed_seq_params"])}
    params = {name: value for name, value in params.items() if name in PARAMS}
    return call | {"packed_seq_params": RoutedPackedSeqParams(**params, routed_experts=torch.from_numpy(routes))}


@pytest.mark.parametrize("padding", [{}, {"gap": 3, "tail": 2}], ids=["packed", "slots"])
@pytest.mark.parametrize("recompute", ["nothing", "layers"])
def test_rows_inside_the_model_take_their_routes(recompute, padding):
    stock, tree = models(**RECOMPUTE[recompute])
    samples = with_routes(branching_samples(), "one token", SHAPE)
    call = routed_call(samples, **padding)
    answers = fold_inside(tree)(**call)[0]
    mine, total = [], 0.0
    for span, sample in zip(spans(call), samples, strict=True):
        logprob = torch.log_softmax(answers[span][:-1], dim=-1)
        mine.append(logprob.gather(1, torch.as_tensor(sample.tokens[1:].astype(np.int64))[:, None])[:, 0])
        total = total - (mine[-1] * torch.as_tensor(sample.loss_mask[1:].copy())).sum()
    total.backward()
    found = {"logprob": [row.detach() for row in mine], "loss": total.detach(), "grads": take_gradients(tree)}
    assert_equal(found, step_stock(stock, samples), FP32_INSIDE)
    rows = [Sample(tokens=one.tokens, routed_experts=one.signals.routes) for one in samples]  # of one merge key
    assert tree.folding.last.to_log()["fold/fold_ratio"] == pytest.approx(fold(rows).fold_ratio)


def test_the_first_check_replays_routes(monkeypatch):
    call = routed_call(with_routes(branching_samples(), "one token", SHAPE), gap=1)
    for mode in (True, False):
        _, tree = models()
        fold_inside(tree.train(mode), check_first=True)(**call)
    monkeypatch.setattr(fold_check, "replaying", lambda model, routes: nullcontext())
    with pytest.raises(fold_check.FoldCheckError, match="row 0 differs"):
        fold_inside(models()[1], check_first=True)(**call)


def test_routes_inside_the_model_are_checked():
    _, tree = models()
    samples = with_routes(branching_samples()[:2], "agree", SHAPE)
    call = routed_call(samples)
    call["packed_seq_params"].routed_experts = call["packed_seq_params"].routed_experts[1:]
    with pytest.raises(ValueError, match=r"packed_seq_params\.routed_experts must be \[\d+, layers, top-k\]"):
        fold_inside(tree)(**call)
    call = routed_call(samples)
    call["packed_seq_params"].routed_experts = call["packed_seq_params"].routed_experts[:, :2]
    with pytest.raises(ValueError, match="has routes of 2 layers, but the model has 3"):
        tree(**call)


REFUSED = [
    ({}, [[[0, 1]]], r"has routes of 1 layers, but the model has 3 \(num_layers\), 3 of them with experts"),
    ({}, [[[0, 1, 2]] * 3], r"has 3 experts for a token and layer, but the model chooses 2 \(moe_router_topk\)"),
    ({}, [[[0, 8]] * 3], r"has expert 8, but the model has 8 \(num_moe_experts\), counted from 0"),
    (
        {"moe_router_fusion": True},
        [[[0, 1]] * 3],
        "has routes, which the fused kernel of moe_router_fusion=True does not take; set moe_router_fusion=False",
    ),
    ({"moe_z_loss_coeff": 0.1}, [[[0, 1]] * 3], "has routes and moe_z_loss_coeff=0.1: the last token .* set it to 0"),
    (
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
        [[[0, 1]] * 3],
        "has routes and moe_aux_loss_coeff=0.1",
    ),
    (
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        [[[0, 1]] * 3],
        "has routes and moe_router_bias_update_rate=0.001",
    ),
    ({}, [[[0, 1], [0, 1], [0, -1]]], "has -1 among the experts at index 0; give -1 in all entries"),
    ({}, [[[0, 1], [0, 1], [-1, -1]]], "has -1 among the experts at index 0; give -1 in all entries"),
]


@pytest.mark.parametrize(("changes", "routes", "fault"), REFUSED, ids=range(len(REFUSED)))
def test_routes_that_do_not_fit_the_model_are_refused(changes, routes, fault):
    config = tiny_config(**ROUTED)
    for name, value in changes.items():
        setattr(config, name, value)
    sample = Sample(tokens=[1, 2], routed_experts=routes, source="rollouts.jsonl:7")
    with pytest.raises(SampleError, match=f"^rollouts.jsonl:7: field 'routed_experts' {fault}"):
        check_sample_routes(config, sample)
    _, tree = models()
    for name, value in changes.items():
        setattr(tree.config, name, value)
    with pytest.raises(ValueError, match=f"^field 'routed_experts' {fault}"):
        tree_forward(tree, MicroBatch.from_layout(fold([sample])))


def test_rows_that_an_engine_filled_with_zeros_are_refused():
    config = tiny_config(**ROUTED)
    sample = Sample(tokens=[1, 2, 3], routed_experts=[[[0, 1]] * 3, [[0, 0]] * 3], source="a:1")
    with pytest.raises(
        SampleError, match=r"^a:1: .* sends the token at index 1 to one expert twice, in layer 0; give -1"
    ):
        check_sample_routes(config, sample)


@pytest.mark.parametrize("filler", [[0, 0], [-1, -1], [99, -1]], ids=str)
@pytest.mark.parametrize("is_hybrid", [False, True], ids=["gpt", "hybrid"])
def test_rows_of_layers_without_experts_are_not_read(is_hybrid, filler):
    config = tiny_config(**ROUTED)
    if is_hybrid:
        config.hybrid_layer_pattern = "M|EE"
    else:
        config.moe_layer_freq = [0, 1, 1]
    routed = [[filler, [0, 1], [2, 1]], [filler, [1, 3], [2, 0]]]
    sample = Sample(tokens=[1, 2, 3], routed_experts=routed)
    check_sample_routes(config, sample)
    longer = Sample(tokens=[1, 2, 3, 4], routed_experts=[*routed, [filler, [3, 0], [2, 1]]])
    layout = fold([longer, sample])
    check_routes(config, layout.routes)
    assert layout.routes[:, 1].tolist() == [[0, 1], [1, 3], [3, 0], [-1, -1]]  # the last token takes the longer's
    with pytest.raises(SampleError, match="has -1 among the experts at index 1"):
        check_sample_routes(config, Sample(tokens=[1, 2, 3], routed_experts=[routed[0], [[0, 0], [-1, -1], [2, 1]]]))
    with pytest.raises(SampleError, match="index 0 to one expert twice, in layer 1"):
        check_sample_routes(config, Sample(tokens=[1, 2], routed_experts=[[filler, [0, 0], [2, 1]]]))


def test_a_model_without_experts_refuses_routes():
    sample = Sample(tokens=[1, 2], routed_experts=[[[0, 1]]], source="a:1")
    with pytest.raises(SampleError, match=r"^a:1: .* has routes, but the model has no experts \(num_moe_experts\)"):
        check_sample_routes(tiny_config(), sample)
    with pytest.raises(SampleError, match=r"^a:1: .* has routes, but CUDA graphs of moe_router would not follow them"):
        check_sample_routes(config_with(**GRAPHS, num_moe_experts=2), sample)
