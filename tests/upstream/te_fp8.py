"""TransformerEngine's own layers in FP8, folded. Run by test_transformer_engine_layers.py, as te_layers.py is.

Everything but FP8 is computed in fp64. With a token's own scales, those of blocks and MXFP8, its forward is that of the
sample by itself; with a scale of the whole tensor it is that of the samples in one micro-batch. Gradients of a shared
token are summed before they are quantised. They are held to the rule of ``verify``: no further from the model without
FP8 than 3 times the unfolded samples in FP8.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import te_layers  # isort: skip  before Megatron-Core
import pytest
import torch
from harness import folded_jobs, folded_runs
from harness.folded_jobs import Job
from harness.oracles import worst
from harness.packed_calls import ROWS, cotangent, packed, run_row, spans
from harness.seam_models import build, tiny_config, twins
from harness.seam_runs import LATENT, MOE, SAMPLES
from harness.worlds import Layout
from te_layers import FULL, STOCK, of_te, te_spec

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import restore
from mcore_prefix_tree.mcore import fold_inside
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.engine.verification import FACTOR
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.mcore.packed import fold_check
from mcore_prefix_tree.mcore.seam.all_tokens import padding_multiple
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

pytestmark = te_layers.pytestmark
transformer_engine_on_the_cpu = te_layers.transformer_engine_on_the_cpu
RECIPES = ("tensorwise", "blockwise", "mxfp8")
# Products in FP8 have sizes that 16, or 32, divides.
SIZES = {"hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16}
GROUPED = MOE | {"moe_grouped_gemm": True, "moe_ffn_hidden_size": 32}
WIDE = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 32, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": GROUPED,
    "all experts": GROUPED | {"moe_router_topk": 4},
    "latent": LATENT | WIDE,
    "full recompute": FULL,
    "recomputed experts": GROUPED | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def fp8(recipe: str) -> dict[str, Any]:
    return {"fp8": "hybrid", "fp8_recipe": recipe}


def make(name: str, recipe: str) -> tuple[Any, Any, Any]:
    """A stock model and one that follows trees, in FP8, and the stock model without, with the same weights."""
    settings = STOCK | SIZES | MODELS[name]
    config, plain = tiny_config(**settings, **fp8(recipe)), tiny_config(**settings)
    stock, tree = twins(config, te_spec(config))
    exact = build(plain, te_spec(plain))
    exact.load_state_dict(stock.state_dict())
    return stock, tree, exact


def batch_of(model: Any, samples: Sequence[Sample] = SAMPLES) -> MicroBatch:
    return MicroBatch.from_layout(fold(samples, pad_to_multiple_of=padding_multiple(model)), attention_backend="path")


def by_itself(model: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities of each sample, padded at its end, and the gradients of their weighted sum."""
    logprobs, multiple = [], padding_multiple(model)
    for sample in SAMPLES:
        size = -(-len(sample) // multiple) * multiple
        ids = torch.zeros(1, size, dtype=torch.int64)
        ids[0, : len(sample)] = torch.tensor(sample.tokens.tolist())
        logits = model(ids, torch.arange(size).unsqueeze(0), None)[0, : len(sample) - 1] / sample.temperature
        logprob = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1 : len(sample), None])[:, 0]
        (-logprob * torch.tensor(sample.loss_mask[1:].tolist())).sum().backward()
        logprobs.append(logprob.detach())
    return logprobs, gradients(model)


def along_tree(model: Any, batch: MicroBatch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """As :func:`by_itself`, of a folded micro-batch."""
    logprob, _ = Logprobs(fused=False).read(tree_forward(model, batch), batch)
    (-logprob * batch.loss_weight).sum().backward()
    return [row[1:].detach() for row in restore(logprob, batch.layout)], gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def assert_no_further(mine: list[float], own: list[float], least: float, most: float) -> None:
    """Hold the largest error of a folded run to the largest of the unfolded one, which is FP8's rounding."""
    assert least < max(own) < most, max(own)
    assert max(mine) <= FACTOR * max(own), (max(mine), max(own))


def errors_of(grads: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> list[float]:
    """The error of each parameter's gradient, which counts as no smaller than a share of all."""
    floor = 1e-3 * float(torch.stack([grad.norm() for grad in exact.values()]).norm())
    return [float((grads[name] - grad).norm()) / max(float(grad.norm()), floor) for name, grad in exact.items()]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_folded_is_unfolded(name: str, recipe: str) -> None:
    stock, tree, exact = make(name, recipe)
    mine, own, without = along_tree(tree, batch_of(tree)), by_itself(stock), by_itself(exact)
    of_rows = [[error(*pair) for pair in zip(one[0], without[0], strict=True) if len(pair[1])] for one in (mine, own)]
    assert_no_further(*of_rows, 0.01, 0.1)
    # Rounding gives a token to another expert, which may have had none.
    most = 20 if name in ("experts", "recomputed experts") else 0.6
    assert_no_further(*(errors_of(one[1], without[1]) for one in (mine, own)), 0.1, most)
    if recipe != "tensorwise":
        assert max(worst(*rows) for rows in zip(mine[0], own[0], strict=True)) < 1e-12


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_whole_tensors_scale_is_that_of_unique_tokens(name: str) -> None:
    """They have the largest number of all samples' tokens, so folding a micro-batch does not change its scales."""
    _, tree, _ = make(name, "tensorwise")
    apart = [
        Sample(tokens=sample.tokens, loss_mask=sample.loss_mask, merge_key=index)
        for index, sample in enumerate(SAMPLES)
    ]
    batches = [batch_of(tree, samples) for samples in (SAMPLES, apart)]
    assert all(batch.layout.padded_size > batch.layout.physical_tokens for batch in batches), "padding counts, too"
    assert batches[0].layout.physical_tokens < batches[1].layout.physical_tokens
    found = [along_tree(tree, batch)[0] for batch in batches]
    assert max(worst(*rows) for rows in zip(*found, strict=True)) < 1e-12


@pytest.mark.parametrize(("name", "without"), [("full recompute", "dense"), ("recomputed experts", "experts")])
def test_recomputation_is_in_fp8_too(name: str, without: str) -> None:
    """Backward, where layers run again, is outside of upstream's context of FP8."""
    again, once = (make(one, "tensorwise")[1] for one in (name, without))
    once.load_state_dict(again.state_dict())
    found = [along_tree(tree, batch_of(tree))[1] for tree in (again, once)]
    assert max(worst(found[0][name], grad) for name, grad in found[1].items()) < 1e-12


@pytest.mark.parametrize(
    ("recipe", "multiple", "said"),
    [("tensorwise", 1, "divisible by 8"), ("blockwise", 8, "caller must pad"), ("mxfp8", 16, "divisible by 32")],
)
def test_transformer_engine_refuses_other_sizes(recipe: str, multiple: int, said: str) -> None:
    _, tree, _ = make("dense", recipe)
    size = -(-fold(SAMPLES).physical_tokens // 32) * 32 + multiple
    batch = MicroBatch.from_layout(fold(SAMPLES, padded_size=size), attention_backend="path")
    with pytest.raises((ValueError, RuntimeError, AssertionError), match=said):
        along_tree(tree, batch)


CUT = {"max_tokens": 10, "over_budget": "carry"}
LAYOUTS = {
    "TP and SP": (2, Layout(tp=2, sequence_parallel=True), {}, {}),
    "latent, TP and SP": (2, Layout(tp=2, sequence_parallel=True), dict(folded_runs.LATENT) | WIDE, {}),
    "PP": (2, Layout(pp=2), {}, {"max_tokens": 60}),
    "EP": (
        2,
        Layout(ep=2),
        dict(folded_runs.MOE) | {"moe_grouped_gemm": True, "moe_router_topk": 4},
        {"max_tokens": 90},
    ),
    "chunks": (1, Layout(), {}, CUT),
    "chunks, TP and SP": (2, Layout(tp=2, sequence_parallel=True), {}, CUT),
    "latent chunks, TP and SP": (2, Layout(tp=2, sequence_parallel=True), dict(folded_runs.LATENT) | WIDE, CUT),
}
QUICK = LAYOUTS.keys() - {"latent chunks, TP and SP", "latent, TP and SP", "PP"}


@functools.cache
def on_one_rank(config: tuple[tuple[str, Any], ...]) -> folded_runs.Result:
    return folded_runs.oracle(Job(config=config))


@pytest.mark.parametrize("recipe", [pytest.param("tensorwise", marks=pytest.mark.slow), "mxfp8"])
@pytest.mark.parametrize(
    "name", [*sorted(QUICK), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(LAYOUTS.keys() - QUICK))]
)
def test_ranks_and_chunks(name: str, recipe: str) -> None:
    size, layout, changes, cut = LAYOUTS[name]
    plain = tuple((STOCK | SIZES | {"ffn_hidden_size": 128} | changes).items())
    config = (*plain, *fp8(recipe).items())
    with mock.patch.multiple(
        folded_runs,
        unfolded_gradients=functools.partial(of_te, folded_jobs.unfolded_gradients),
        folded_gradients=functools.partial(of_te, folded_jobs.folded_gradients),
    ):
        mine = folded_runs.folded(size, layout, Job(config=config, **cut))
        own, exact = on_one_rank(config), on_one_rank(plain)
    assert_no_further(*(errors_of(one[1], exact[1]) for one in (mine, own)), 0.1, 0.6)
    assert abs(mine[0] - exact[0]) < 0.01 * exact[0]


def inside(recipe: str, **settings: Any) -> tuple[Any, Any]:
    """A model that folds packed rows, and a stock one without FP8."""
    _, tree, exact = make("dense", recipe)
    return fold_inside(tree, attention_backend="path", **settings), exact


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("max_tokens", [None, 5], ids=["", "in parts"])
def test_inside_the_model(recipe: str, max_tokens: int | None) -> None:
    """Rows as a trainer packs them, whose number of tokens no 16 divides."""
    (model, exact), call = inside(recipe, max_tokens=max_tokens), packed(ROWS)
    logits, own = model(**call), [run_row(exact, call["input_ids"][:, span]) for span in spans(call)]
    assert max(error(logits[:, span], row) for span, row in zip(spans(call), own, strict=True)) < 0.2
    weight = cotangent(logits.shape, logits.dtype)
    (logits * weight).sum().backward()
    sum((row * weight[:, span]).sum() for span, row in zip(spans(call), own, strict=True)).backward()
    errors = errors_of(gradients(model), gradients(exact))
    assert 0.05 < max(errors) < 0.6
    with torch.no_grad():
        assert worst(model(**call), logits.detach()) < 1e-12


@pytest.mark.parametrize("training", [True, False])
def test_the_first_check_is_without_fp8(training: bool) -> None:
    """It is as sharp as without, and the weights of FP8 are those of the step."""
    model, _ = inside("mxfp8", check_first=True)
    model.train(training)
    model(**packed(ROWS))
    assert model.config.fp8 == "hybrid"
    with torch.no_grad():
        expected = inside("mxfp8")[0].eval()(**packed(ROWS))
        assert worst(model(**packed(ROWS)), expected) < 1e-12
    model, _ = inside("mxfp8", check_first=True)
    model.train(training)
    with mock.patch.object(fold_check, "TOLERANCE", {torch.float64: 1e-12}):
        model(**packed(ROWS))


def test_the_first_check_leaves_no_weights_of_before() -> None:
    model, _ = inside("mxfp8", check_first=True)
    model.train()
    model(**packed(ROWS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.set_is_first_microbatch()  # as a schedule does
        model.eval()
        checked = model(**packed(ROWS))
        model.set_is_first_microbatch()
        assert worst(checked, model(**packed(ROWS))) < 1e-12
