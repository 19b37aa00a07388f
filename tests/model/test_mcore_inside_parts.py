"""A model that folds inside and runs large micro-batches in parts gives the stock model's outputs for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness.in_double import kept_double
from harness.marks import mostly_in_ci, quick
from harness.oracles import worst
from harness.packed_calls import (
    FP64,
    ROWS,
    backend_of,
    check_hidden,
    check_logits,
    check_logprobs,
    check_losses,
    cotangent,
    gradients,
    log_softmax_of_row,
    packed,
    rows_of,
    some_labels,
    spans,
)
from harness.routes import with_routes
from harness.seam_models import (
    DELTA_NET,
    MAMBA,
    RECOMPUTE,
    branching_samples,
    deep_samples,
    hybrid_twins,
    tiny_config,
    twins,
    with_long_memory,
)
from harness.seam_runs import FP32_INSIDE, LATENT, MOE, SPARSE, WINDOWS_AND_SINKS

from mcore_prefix_tree.mcore import PicturePackedSeqParams, RoutedPackedSeqParams, fold_inside
from mcore_prefix_tree.mcore.packed import decoder_in_parts
from mcore_prefix_tree.mcore.packed.decoder_in_parts import GradientsApart, recomputation
from mcore_prefix_tree.mcore.packed.fold_check import FoldCheckError
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_HYBRID_MODEL, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.experts import TreeRouterMixin

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

BALANCED = {
    **MOE,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}
# name: fields of the config, pattern of a HybridModel
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "attention": ({}, None),
    "latent": (LATENT, None),
    "experts": (MOE, None),
    "balanced experts": (BALANCED, None),
    "window": (WINDOWS_AND_SINKS["window"], None),
    "full recompute": (RECOMPUTE["layers"], None),
    "recomputed attention": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, None),
    "pattern": ({}, "*-*-"),
    "state spaces": (MAMBA, "M*M-"),
    "delta net": (DELTA_NET, "G*G-"),
    "sparse": (SPARSE | {"dsa_indexer_loss_coeff": 0.7, "dsa_indexer_topk": 3}, None),
}


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


def make(name: str) -> tuple[Any, Any]:
    """Return a stock model, and one that follows trees, with the same weights."""
    settings, pattern = MODELS[name]
    needed = {"*": HAS_HYBRID_MODEL, "G": HAS_DELTA_NET, "M": HAS_HYBRID_MODEL}
    if not all(needed.get(letter, True) for letter in pattern or ""):
        pytest.skip("this megatron-core has no such layers that follow a tree")
    if name == "sparse" and not HAS_SPARSE_ATTENTION:
        pytest.skip("sparse attention follows a tree since megatron-core 0.19")
    config = tiny_config(**settings | {"num_layers": len(pattern or "two")})
    models = twins(config) if pattern is None else with_long_memory(hybrid_twins(config, pattern))
    return models[0].train(), models[1].train()


def inside(tree: Any, **settings: Any) -> Any:
    return fold_inside(tree, attention_backend=backend_of(tree.config), **settings)


def limit_of(name: str) -> float:
    """Upstream's scores of experts are in fp32 for any dtype of the model."""
    return FP32_INSIDE if "experts" in name else FP64


# A loss in addition to the trainer's is compared with that of the micro-batch at once.
WITH_ONE_LOSS = {name: model for name, model in MODELS.items() if name not in ("balanced experts", "sparse")}


@pytest.mark.parametrize("name", quick("attention", "experts", "delta net", of=WITH_ONE_LOSS))
def test_logits_losses_and_gradients_of_rows(name: str) -> None:
    stock, tree = make(name)
    model = inside(tree, max_tokens=5)
    check_logits(model, stock, packed(ROWS, gap=1, tail=2), limit_of(name))
    assert model.folding.last.recomputed_tokens > model.folding.last.unique_tokens / 2
    check_losses(model, stock, packed(ROWS), limit_of(name))


def trained(model: Any, call: dict[str, Any], **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a model's answer, and the gradients of an arbitrary function of it."""
    answer = model(**call, **given)
    (answer * cotangent(answer.shape, answer.dtype)).sum().backward()
    return answer.detach(), gradients(model)


@pytest.mark.parametrize("name", mostly_in_ci("attention", "balanced experts", of=MODELS))
def test_any_number_of_tokens_gives_the_same(name: str) -> None:
    call = packed(rows_of(deep_samples(5)) if name in ("state spaces", "delta net", "sparse") else ROWS)
    settings = {"labels": some_labels(call)}
    at_once = inside(make(name)[1])
    expected, wanted = trained(at_once, call, **settings)
    unique = None
    for most in (1, 2, 7, 64, 65) if name == "attention" else (7, 64):
        model = inside(make(name)[1], max_tokens=most)
        model.load_state_dict(at_once.state_dict())
        answer, found = trained(model, call, **settings)
        unique = model.folding.last.unique_tokens
        assert worst(answer, expected) <= limit_of(name)
        assert found.keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            assert worst(found[parameter], gradient) <= limit_of(name), (most, parameter)
    assert unique is not None
    assert unique > 7


def test_experts_count_each_token_once() -> None:
    counts = []
    for settings in ({}, {"max_tokens": 7}):
        model = inside(make("balanced experts")[1], **settings)
        trained(model, packed(ROWS))
        routers = [module for module in model.modules() if isinstance(module, TreeRouterMixin)]
        counts.append([router.local_tokens_per_expert.clone() for router in routers])
    assert len(counts[0]) == 3
    assert all(torch.equal(once, parts) for once, parts in zip(*counts, strict=True))
    assert counts[0][0].sum() == 2 * sum(map(len, ROWS))


def test_logprobs_and_hidden_states() -> None:
    stock, tree = make("attention")
    check_logprobs(inside(tree, max_tokens=5), stock, packed(ROWS, gap=1), temperature=0.7)
    stock, tree = twins(tiny_config(), post_process=False)
    check_hidden(inside(tree, max_tokens=6), stock, packed(ROWS))


def test_frozen_parameters_get_no_gradient() -> None:
    """Also where the input of the decoder has none, for example with adapters."""
    stock, tree = make("attention")
    for model in (stock, tree):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("linear_proj" in name)
    check_losses(inside(tree, max_tokens=5), stock, packed(ROWS))


@pytest.mark.parametrize("training", [True, False])
def test_forward_only(training: bool) -> None:
    stock, tree = make("delta net")
    model, call = inside(tree.train(training), max_tokens=5), packed(ROWS)
    labels = some_labels(call)
    with torch.no_grad():
        losses = model(**call, labels=labels)
    for span in spans(call):
        expected = -log_softmax_of_row(stock, call, span).gather(1, labels[0, span, None])[:, 0]
        assert worst(losses[0, span], expected) <= FP64
    assert model.folding.last.recomputed_tokens == 0


def test_scores_are_those_of_training_to_the_bit() -> None:
    """So a ratio of the first update, for example of GRPO, is 1."""
    model, call = inside(make("attention")[1], max_tokens=5), packed(ROWS)
    labels = some_labels(call)
    with torch.no_grad():
        scored = model(**call, labels=labels)
    assert torch.equal(model(**call, labels=labels), scored)


def test_steps_accumulate_into_gradients() -> None:
    _, tree = make("attention")
    model, call = inside(tree, max_tokens=5), packed(ROWS)
    labels = some_labels(call)
    model(**call, labels=labels).sum().backward()
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model(**call, labels=labels).sum().backward()
    for name, gradient in gradients(model).items():
        assert worst(gradient, 2 * once[name]) <= FP64


def test_recomputation_is_back_after_a_step() -> None:
    model = inside(make("full recompute")[1], max_tokens=5)
    before = recomputation(model)
    assert before
    trained(model, packed(ROWS))
    assert recomputation(model) == before


def test_routes_are_cut() -> None:
    shape = (3, 2, 4)
    answers = []
    for settings in ({}, {"max_tokens": 5}):
        tree = inside(make("experts")[1], **settings)
        samples = with_routes(branching_samples(), "one token", shape)
        call = packed(rows_of(samples))
        routes = np.full((call["input_ids"].shape[1], *shape[:2]), -1)
        for span, sample in zip(spans(call), samples, strict=True):
            routes[span] = sample.signals.routes.ids
        call["packed_seq_params"] = RoutedPackedSeqParams.of(call["packed_seq_params"], torch.from_numpy(routes))
        answers.append(trained(tree, call))
    (expected, wanted), (answer, found) = answers
    assert worst(answer, expected) <= FP32_INSIDE
    assert all(worst(found[name], gradient) <= FP32_INSIDE for name, gradient in wanted.items())


def test_pictures_are_cut() -> None:
    config = tiny_config(mrope_section=[2, 1, 1])
    answers = []
    for settings in ({}, {"max_tokens": 5}):
        _, tree = twins(config, position_embedding_type="mrope")
        model, call = fold_inside(tree.train(), **settings), packed(ROWS, gap=1)
        size = call["input_ids"].shape[1]
        numbers = torch.where(call["input_ids"][0] > 20, call["input_ids"][0], -1)
        positions = torch.zeros(3, 1, size, dtype=torch.int64)
        for span in spans(call):
            place = torch.arange(span.stop - span.start)
            positions[:, 0, span] = torch.stack([place // 2, place // 3, place])
        features = torch.randn(size, 1, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        embedded = model.embedding(input_ids=call["input_ids"], position_ids=positions)
        by_id = features[call["input_ids"][0]].requires_grad_()
        inputs = torch.where((numbers >= 0)[:, None, None], by_id, embedded)
        params = PicturePackedSeqParams.of(call["packed_seq_params"], numbers)
        answers.append(
            trained(model, call | {"packed_seq_params": params, "position_ids": positions, "decoder_input": inputs})
        )
    (expected, wanted), (answer, found) = answers
    assert worst(answer, expected) <= FP64
    assert all(worst(found[name], gradient) <= FP64 for name, gradient in wanted.items())


@pytest.mark.parametrize("kind", ["attention", "experts"])
def test_the_first_check_runs_the_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, tree = make(kind)
    model = inside(tree, max_tokens=5, check_first=True)
    check_losses(model, stock, packed(ROWS), limit=limit_of(kind))
    assert model.folding._checked == {(True, True)}

    def add_twice(apart: GradientsApart, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        for _ in range(2):
            add(apart, parameter, gradient)

    add, join = GradientsApart.add, decoder_in_parts._join
    with monkeypatch.context() as patched:
        patched.setattr(GradientsApart, "add", add_twice)
        with pytest.raises(FoldCheckError, match="the gradient of decoder"):
            inside(make(kind)[1], max_tokens=5, check_first=True)(**packed(ROWS))
    monkeypatch.setattr(decoder_in_parts, "_join", lambda *parts: join(*parts) * 1.01)
    with pytest.raises(FoldCheckError, match="row 0 differs"):
        inside(make(kind)[1], max_tokens=5, check_first=True)(**packed(ROWS))


def test_the_first_check_runs_the_parts_below_frozen_embeddings() -> None:
    tree = make("attention")[1]
    tree.embedding.requires_grad_(False)
    inside(tree, max_tokens=5, check_first=True)(**packed(ROWS))


def test_a_micro_batch_without_rows() -> None:
    model = inside(make("attention")[1], max_tokens=5)
    call = packed([], tail=3)
    losses = model(**call, labels=call["input_ids"])
    assert losses.tolist() == [[0.0] * 3]
    losses.sum().backward()


def test_what_cannot_run_in_parts_is_refused() -> None:
    sharded = inside(make("attention")[1], max_tokens=5)
    next(sharded.decoder.parameters()).__fsdp_param__ = True
    with pytest.raises(NotImplementedError, match="parameters that FSDP shards"):
        sharded(**packed(ROWS))
    with pytest.raises(ValueError, match="max_tokens=0 is below 1"):
        inside(make("attention")[1], max_tokens=0)
    selective = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    with pytest.raises(NotImplementedError, match=r"recompute_modules=\['mlp'\]"):
        inside(twins(tiny_config(**selective))[1], max_tokens=5)
    comparing = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    with pytest.raises(NotImplementedError, match="global_aux_loss"):
        inside(twins(tiny_config(**MOE | comparing))[1], max_tokens=5)
