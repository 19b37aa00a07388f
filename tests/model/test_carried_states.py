"""Chunks of a tree that begin with each other's states train recurrent layers as the stock ones on separate samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness.carried_trees import assert_equal, carried, score_in_parts, small_tree, train, unfolded
from harness.fla_in_torch import fla_in_torch
from harness.in_double import kept_double
from harness.marks import mostly_in_ci
from harness.seam_models import (
    DELTA_NET,
    MAMBA,
    RECOMPUTE,
    deep_samples,
    hybrid_twins,
    tiny_config,
    twins,
    with_long_memory,
)
from harness.seam_runs import FP32_INSIDE, MOE, assert_same_gradients, score_alone, sft_step, take_gradients

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER
from mcore_prefix_tree.mcore.seam.levels import Levels

if not HAS_HYBRID_MODEL:
    pytest.skip(NEEDS_NEWER, allow_module_level=True)

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]
FP64 = 1e-12
GPT = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}
# name: pattern, fields of the config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gated DeltaNet": ("G*G-", {}),
    "only Gated DeltaNet": ("G", {}),
    "Mamba": ("M*M-", {}),
    "only Mamba": ("M", {}),
    "both": ("MG*M", {}),
    "full recompute": ("MG*-", RECOMPUTE["layers"]),
    "experts": ("MGE*E", MOE),
    "wide convolution": ("G", {"linear_conv_kernel_dim": 7}),
    "convolution of one token": ("G*", {"linear_conv_kernel_dim": 1}),
    "one group": ("M*", {"mamba_num_groups": 1}),
}


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


def make_twins(name: str) -> tuple[Any, Any]:
    pattern, settings = MODELS[name]
    if "G" in pattern and not HAS_DELTA_NET:
        pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19")
    config = tiny_config(**MAMBA | DELTA_NET | settings | {"num_layers": len(pattern)})
    return with_long_memory(hybrid_twins(config, pattern))


@pytest.mark.parametrize("name", mostly_in_ci("only Gated DeltaNet", "only Mamba", "both", "full recompute", of=MODELS))
def test_random_cuts_of_a_tree(name: str) -> None:
    samples, rng = small_tree(2 + len(name)), random.Random(name)
    stock, tree = make_twins(name)
    expected = unfolded(stock, samples)
    places, limit = range(1, fold(samples).physical_tokens), FP32_INSIDE if name == "experts" else FP64
    for _ in range(2):
        cuts = rng.sample(places, rng.randint(2, min(9, len(places))))
        of_pass = {"multiple": rng.randint(1, 4), "pass_tokens": rng.randint(1, 9)}
        assert_equal(train(tree, carried(samples, cuts, **of_pass)), expected, limit)
    # Chunks of one token where the model is one layer, else of two.
    every = places[:: min(2, len(tree.decoder.layers))]
    assert_equal(train(tree, carried(samples, every)), expected, limit)


@pytest.mark.parametrize("name", ["Gated DeltaNet", "Mamba", "both"])
def test_segments_of_several_chunks_of_a_rule(name: str) -> None:
    """Cuts inside and at the edges of the 64 tokens that a rule computes at once."""
    samples = [one for one in deep_samples(5) if one.tokens[0] == deep_samples(5)[0].tokens[0]]
    stock, tree = make_twins(name)
    size = fold(samples).physical_tokens
    assert size > 200
    cuts = sorted({63, 64, 65, 127, 129, 150, size - 5})
    batches = carried(samples, cuts, pass_tokens=100)
    assert any(len(Levels.of(one.packed_seq_params.tree_metadata).levels) > 1 for one in batches)
    assert_equal(train(tree, batches), unfolded(stock, samples), FP64)


@pytest.mark.parametrize("name", ["Gated DeltaNet", "both", "full recompute"])
def test_states_of_fla_pass_between_chunks(name: str) -> None:
    samples = [one for one in deep_samples(5) if one.tokens[0] == deep_samples(5)[0].tokens[0]]
    stock, tree = make_twins(name)
    mixers = [one for one in tree.modules() if hasattr(one, "gated_delta_rule")]
    for mixer in mixers:
        mixer.gated_delta_rule = None  # FLA's whole rule, which is not called
    cuts = [63, 64, 90, fold(samples).physical_tokens - 5]
    with fla_in_torch() as calls:
        found = train(tree, carried(samples, cuts, pass_tokens=100))
    assert_equal(found, unfolded(stock, samples), FP64)
    assert mixers
    assert calls["chunk_gated_delta_rule_bwd_dhu"] > len(mixers) * len(cuts)


@pytest.mark.parametrize("settings", [{}, RECOMPUTE["layers"]], ids=["plain", "full recompute"])
def test_gpt(settings: dict[str, Any]) -> None:
    if not HAS_DELTA_NET:
        pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19")
    stock, tree = with_long_memory(twins(tiny_config(num_layers=4, **DELTA_NET | GPT | settings)))
    samples = small_tree(3)
    size = fold(samples).physical_tokens
    assert_equal(train(tree, carried(samples, [size // 3, size // 2])), unfolded(stock, samples), FP64)


@pytest.mark.parametrize("trains", [False, True], ids=["from the first to the last", "a step without its backward"])
@pytest.mark.parametrize("name", ["Gated DeltaNet", "Mamba"])
def test_scores_of_chunks(name: str, trains: bool) -> None:
    samples = small_tree(4)
    stock, tree = make_twins(name)
    cuts = range(3, fold(samples).physical_tokens, 3)
    batches = [batch.without_backward() for batch in carried(samples, cuts, trains=trains)]
    joined, layout = score_in_parts(tree, batches), batches[-1].layout.whole
    assert batches[0].packed_seq_params.carry.store.num_bytes == 0
    for at, sample in enumerate(samples):
        with torch.no_grad():
            expected, _ = score_alone(stock, sample)
        np.testing.assert_allclose(joined[layout.sample_tokens(at)[1:]], expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("name", ["Gated DeltaNet", "Mamba"])
def test_states_of_one_path_are_held_at_once(name: str) -> None:
    """Six completions of a prompt, in chunks of five tokens, of which each leaves one state."""
    samples = [Sample(tokens=[*range(6), *[10 + at] * 24]) for at in range(6)]
    _, tree = make_twins(f"only {name}")
    batches = carried(samples, range(5, fold(samples).physical_tokens, 5))
    store, held = batches[0].packed_seq_params.carry.store, []
    for batch in batches:
        sft_step(tree, batch)
        held.append(store.num_bytes)
    assert held[-1] == 0
    assert len(batches[0].packed_seq_params.tree_metadata.handover.ends) == 1
    # Those of a completion and its prompt, and their gradients; there are 29 in all.
    assert max(held) <= 14 * held[0]


def test_frozen_inputs_leave_no_gradient() -> None:
    samples = small_tree(6)
    stock, tree = make_twins("both")
    for model in (stock, tree):
        model.requires_grad_(False)
        model.decoder.layers[0].mixer.A_log.requires_grad_(True)
        model.decoder.layers[2].requires_grad_(True)
    expected = unfolded(stock, samples)["grads"]
    for batch in carried(samples, [fold(samples).physical_tokens // 2]):
        sft_step(tree, batch)
    actual = take_gradients(tree)
    with_gradient = [{name: grad for name, grad in grads.items() if grad is not None} for grads in (actual, expected)]
    assert with_gradient[0].keys() == with_gradient[1].keys() != set()
    assert_same_gradients(*with_gradient, FP64)
