"""Chunks of a tree that begin with each other's states train recurrent layers as the stock ones on separate samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness.carried_trees import carried, score_in_parts, small_tree, train
from harness.fla_in_torch import fla_in_torch
from harness.in_double import kept_double
from harness.seam_models import DELTA_NET, MAMBA, RECOMPUTE, deep_samples, hybrid_twins, tiny_config, with_long_memory
from harness.seam_runs import assert_equal, assert_same_gradients, score_alone, sft_step, take_gradients, unfolded

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER
from mcore_prefix_tree.mcore.seam.levels import Levels

if not HAS_HYBRID_MODEL:
    pytest.skip(NEEDS_NEWER, allow_module_level=True)

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]
FP64 = 1e-12


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


def make_twins(pattern: str, **settings: Any) -> tuple[Any, Any]:
    if "G" in pattern and not HAS_DELTA_NET:
        pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19")
    config = tiny_config(**MAMBA | DELTA_NET | settings | {"num_layers": len(pattern)})
    return with_long_memory(hybrid_twins(config, pattern))


@pytest.mark.parametrize("pattern", ["G*G-", "M*M-", "MG*M"])
def test_segments_of_several_chunks_of_a_rule(pattern: str) -> None:
    """Cuts inside and at the edges of the 64 tokens that a rule computes at once."""
    samples = [one for one in deep_samples(5) if one.tokens[0] == deep_samples(5)[0].tokens[0]]
    stock, tree = make_twins(pattern)
    size = fold(samples).physical_tokens
    assert size > 200
    cuts = sorted({63, 64, 65, 127, 129, 150, size - 5})
    batches = carried(samples, cuts, pass_tokens=100)
    assert any(len(Levels.of(one.packed_seq_params.tree_metadata).levels) > 1 for one in batches)
    assert_equal(train(tree, batches), unfolded(stock, samples), FP64)


@pytest.mark.parametrize(
    ("pattern", "settings"), [("G*G-", {}), ("MG*M", {}), ("MG*-", RECOMPUTE["layers"])], ids=lambda one: str(one)[:4]
)
def test_states_of_fla_pass_between_chunks(pattern: str, settings: dict[str, Any]) -> None:
    samples = [one for one in deep_samples(5) if one.tokens[0] == deep_samples(5)[0].tokens[0]]
    stock, tree = make_twins(pattern, **settings)
    mixers = [one for one in tree.modules() if hasattr(one, "gated_delta_rule")]
    for mixer in mixers:
        mixer.gated_delta_rule = None  # FLA's whole rule, which is not called
    cuts = [63, 64, 90, fold(samples).physical_tokens - 5]
    with fla_in_torch() as calls:
        found = train(tree, carried(samples, cuts, pass_tokens=100))
    assert_equal(found, unfolded(stock, samples), FP64)
    assert mixers
    assert calls["chunk_gated_delta_rule_bwd_dhu"] > len(mixers) * len(cuts)


@pytest.mark.parametrize("trains", [False, True], ids=["from the first to the last", "a step without its backward"])
@pytest.mark.parametrize("pattern", ["G*G-", "M*M-"])
def test_scores_of_chunks(pattern: str, trains: bool) -> None:
    samples = small_tree(4)
    stock, tree = make_twins(pattern)
    cuts = range(3, fold(samples).physical_tokens, 3)
    batches = [batch.without_backward() for batch in carried(samples, cuts, trains=trains)]
    joined, layout = score_in_parts(tree, batches), batches[-1].layout.whole
    assert batches[0].packed_seq_params.carry.store.num_bytes == 0
    for at, sample in enumerate(samples):
        with torch.no_grad():
            expected, _ = score_alone(stock, sample)
        np.testing.assert_allclose(joined[layout.sample_tokens(at)[1:]], expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("pattern", ["G", "M"])
def test_states_of_one_path_are_held_at_once(pattern: str) -> None:
    """Six completions of a prompt, in chunks of five tokens, of which each leaves one state."""
    samples = [Sample(tokens=[*range(6), *[10 + at] * 24]) for at in range(6)]
    _, tree = make_twins(pattern)
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
    stock, tree = make_twins("MG*M")
    for model in (stock, tree):
        model.requires_grad_(False)
        model.decoder.layers[0].mixer.A_log.requires_grad_(True)
        model.decoder.layers[2].requires_grad_(True)
    for batch in carried(samples, [fold(samples).physical_tokens // 2]):
        sft_step(tree, batch)
    grads = take_gradients(tree)
    assert_same_gradients(grads, unfolded(stock, samples)["grads"], FP64)
    assert {grad is None for grad in grads.values()} == {True, False}
