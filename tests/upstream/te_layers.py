"""TransformerEngine's own layers, folded, against unfolded samples. Run by test_transformer_engine_layers.py, which
puts TransformerEngine's Python on the path; nothing collects it by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import te_compiled  # isort: skip  before Megatron-Core
import pytest
import torch
from harness import folded_jobs, folded_runs, forks
from harness.folded_jobs import Job
from harness.oracles import worst
from harness.seam_models import build, tiny_config, twins
from harness.seam_runs import (
    FP32_INSIDE,
    LATENT,
    MOE,
    VARIANTS,
    WINDOWS_AND_SINKS,
    assert_equal,
    assert_folded_is_unfolded,
    folded,
    folded_batch,
    unfolded,
)
from harness.worlds import Layout
from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend

from mcore_prefix_tree.mcore.seam.packed_seq_params import CORE_KNOWS_TREES

pytestmark = [pytest.mark.usefixtures("transformer_engine_on_the_cpu"), pytest.mark.filterwarnings("ignore")]
# The ranks are forked from a process that has it too.
forks.PRELOADED.insert(0, "te_compiled")
# For unfolded samples: the attention that TransformerEngine has in Python.
STOCK = {"attention_backend": AttnBackend.unfused}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GROUPED = MOE | {"moe_grouped_gemm": True}


@pytest.fixture(scope="module")
def transformer_engine_on_the_cpu(megatron_on_the_cpu: None) -> Iterator[None]:
    with te_compiled.on_a_gpu():
        yield


def te_spec(config: Any, vp_stage: int | None = None) -> Any:
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, normalization=config.normalization, vp_stage=vp_stage
    )


def te_twins(settings: dict[str, Any], model_settings: dict[str, Any] | None = None) -> tuple[Any, Any]:
    config = tiny_config(**STOCK, **settings)
    return twins(config, te_spec(config), **(model_settings or {}))


def test_the_layers_are_transformer_engines_and_so_are_the_keys() -> None:
    """A checkpoint moves both ways, extra states for FP8 among its keys."""
    assert extension.HAVE_TE
    for settings in ({}, LATENT, GROUPED):
        stock, tree = te_twins(settings)
        assert list(stock.state_dict()) == list(tree.state_dict())
        assert any(name.endswith("_extra_state") for name in tree.state_dict())
        layer, ours = (model.decoder.layers[0] for model in (stock, tree))
        found = [
            layer.self_attention.linear_proj,
            layer.self_attention.core_attention,
            ours.self_attention.core_attention,
        ]
        if settings is GROUPED:
            found.append(ours.mlp.experts.linear_fc1)
        for module in found:
            assert any(one.__module__.startswith("transformer_engine.pytorch.") for one in type(module).__mro__)


NAMES = [
    *("rope", "yarn", "qk_layernorm", "tied embeddings", "GPT-2", "LayerNorm, biases, rope", "multi-head"),
    *("full recompute", "full recompute by block", "selective recompute", "layers without rope"),
    *("latent attention", "latent attention, yarn", "latent attention, queries without a latent"),
    *("latent attention, full recompute", "latent attention, yarn, selective recompute"),
]


@pytest.mark.parametrize("name", NAMES)
def test_folded_is_unfolded(name: str) -> None:
    stock, tree = te_twins(*VARIANTS[name])
    assert_folded_is_unfolded(stock, tree)


@pytest.mark.parametrize(
    ("name", "limit"),
    # TransformerEngine rounds learned sinks to fp32, and the gradients of each sample's.
    [("window", 1e-12), ("off-by-one", 1e-12), ("learnable sinks", FP32_INSIDE)],
)
def test_windows_and_sinks(name: str, limit: float) -> None:
    stock, tree = te_twins(WINDOWS_AND_SINKS[name])
    assert_folded_is_unfolded(stock, tree, backend="reference", limit=limit)


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, FULL])
@pytest.mark.parametrize("experts", [{}, {"moe_shared_expert_intermediate_size": 16}], ids=["", "shared"])
def test_experts_in_groups(recompute: dict[str, Any], experts: dict[str, Any]) -> None:
    stock, tree = te_twins(GROUPED | experts | recompute)
    assert_folded_is_unfolded(stock, tree, limit=FP32_INSIDE)


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["", "recompute"])
def test_experts_that_get_no_token(recompute: dict[str, Any]) -> None:
    """A step gives them a gradient of zero, as unfolded samples do: the optimizer knows no missing one."""
    stock, tree = te_twins(GROUPED | {"num_moe_experts": 16} | recompute)
    with torch.no_grad():
        for model in (stock, tree):
            for layer in model.decoder.layers:
                # Of four rows and their opposites, two at least win over the rows of zeros.
                rows = layer.mlp.router.weight
                rows[4:8] = -rows[:4]
                rows[8:] = 0
    counts: list[list[int]] = []

    def counted(*given: Any) -> Any:
        counts.append([int(one) for one in given[6]])
        return te_compiled.te_general_grouped_gemm(*given)

    with mock.patch.object(te_compiled.extension, "te_general_grouped_gemm", counted):
        actual = folded(tree, folded_batch())
    assert counts
    assert not any(any(splits[8:]) for splits in counts)
    expected = unfolded(stock, entropy_weight=0.1)
    assert worst(actual["loss"], expected["loss"]) < FP32_INSIDE
    for name, wanted in expected["grads"].items():
        grad = actual["grads"][name]
        assert grad is not None, name
        assert wanted is not None, name
        assert worst(grad, wanted) < FP32_INSIDE or (not wanted.any() and not grad.any()), name


def of_te(function: Any, layout: Any, job: Job, samples: Any) -> Any:
    """On every rank: a step of ``folded_jobs`` with TransformerEngine's layers."""
    with te_compiled.on_a_gpu(), mock.patch.object(folded_jobs, "stock_spec", te_spec):
        return function(layout, job, samples)


CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "recompute": FULL,
    "latent attention": dict(folded_runs.LATENT),
    "experts": dict(folded_runs.MOE) | {"moe_grouped_gemm": True},
}


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    # Upstream is wrong without it for latent attention, and refuses experts.
    [*((name, True) for name in CONFIGS), ("dense", False), ("recompute", False)],
)
def test_tensor_and_sequence_parallelism(name: str, sequence_parallel: bool) -> None:
    job = Job(config=tuple((STOCK | CONFIGS[name]).items()))
    assert_trains(name, job, Layout(tp=2, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("name", ["dense", "latent attention"])
def test_chunks_of_trees(name: str) -> None:
    """Keys and values that chunks carry, or latents, which each rank projects for its heads."""
    job = Job(config=tuple((STOCK | CONFIGS[name]).items()), max_tokens=20, over_budget="carry")
    assert_trains(name, job, Layout(tp=2, sequence_parallel=True))


def assert_trains(name: str, job: Any, layout: Any) -> None:
    with mock.patch.multiple(
        folded_runs,
        unfolded_gradients=functools.partial(of_te, folded_jobs.unfolded_gradients),
        folded_gradients=functools.partial(of_te, folded_jobs.folded_gradients),
    ):
        limit = FP32_INSIDE if name == "experts" else folded_runs.FP64
        expected = folded_runs.oracle(Job(config=job.config))
        folded_runs.check(folded_runs.folded(2, layout, job), expected, limit)


@pytest.mark.skipif(not CORE_KNOWS_TREES, reason="Megatron-Core is not patched")
@pytest.mark.parametrize("settings", [{}, FULL, GROUPED, WINDOWS_AND_SINKS["learnable sinks"]], ids=str)
def test_patched_transformer_engine_attends_by_itself(settings: dict[str, Any]) -> None:
    """Stock specs, no settings for trees: the tree goes through its own ``DotProductAttention.forward``."""
    config = tiny_config(**STOCK, **settings)
    stock, native = (build(config, te_spec(config)) for _ in range(2))
    native.load_state_dict(stock.state_dict(), strict=True)
    assert not any(type(module).__name__.startswith("Tree") for module in native.modules())
    calls = []
    attention = extension.te.pytorch.DotProductAttention
    forward = attention._tree_attention

    def attend(self: Any, *given: Any, **named: Any) -> Any:
        calls.append(self)
        return forward(self, *given, **named)

    backend = "reference" if "softmax_type" in settings else "path"
    with mock.patch.object(attention, "_tree_attention", attend):
        actual = folded(native, folded_batch(backend))
    assert len({id(module) for module in calls}) == config.num_layers
    inexact = {"num_moe_experts", "softmax_type"} & set(settings)
    assert_equal(actual, unfolded(stock, entropy_weight=0.1), FP32_INSIDE if inexact else 1e-12)
