"""Gated DeltaNet along a tree is the stock layer on each sample by itself, to fp64's last digits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.fla_in_torch import RULE, fla_in_torch
from harness.in_double import kept_double
from harness.marks import quick
from harness.seam_models import (
    DELTA_NET,
    RECOMPUTE,
    deep_samples,
    hybrid,
    hybrid_twins,
    tiny_config,
    twins,
    with_long_memory,
)
from harness.seam_runs import (
    FP32_INSIDE,
    MOE,
    assert_folded_is_unfolded,
    assert_same_gradients,
    batch_of,
    supervised,
    take_gradients,
)

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore import with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.outputs import WeightedSum
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET
from mcore_prefix_tree.mcore.seam.levels import Levels
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees

if not HAS_DELTA_NET:
    pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19", allow_module_level=True)

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn

from mcore_prefix_tree.cpu.hybrid import hybrid_stack

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

GPT = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
# name: (pattern, fields of the config, seed of the forest)
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "one in four is attention": ("GGG*", {}, 0),
    "only states": ("G", {}, 1),
    "with MLPs": ("G-*-", {}, 2),
    "with experts": ("GE*E", MOE, 3),
    "deterministic": ("G*G-", {"deterministic_mode": True}, 4),
    "full recompute": ("G*G-", RECOMPUTE["layers"], 5),
    "wide convolution": ("G*", {"linear_conv_kernel_dim": 7}, 7),
    "convolution of one token": ("G*", {"linear_conv_kernel_dim": 1}, 8),
    "as many keys as values": ("G*", {"linear_num_key_heads": 4}, 9),
    "gated attention": ("GG*-", {"attention_output_gate": True}, 10),
}


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


def make_twins(pattern: str, **settings: Any) -> tuple[Any, Any]:
    return with_long_memory(hybrid_twins(tiny_config(**DELTA_NET | settings | {"num_layers": len(pattern)}), pattern))


def make_tree(pattern: str) -> Any:
    return hybrid(tiny_config(**DELTA_NET | {"num_layers": len(pattern)}), pattern, with_prefix_tree(hybrid_stack))


@pytest.mark.parametrize("name", quick("one in four is attention", "full recompute", of=VARIANTS))
def test_folded_is_unfolded(name: str) -> None:
    pattern, settings, seed = VARIANTS[name]
    limit = FP32_INSIDE if "E" in pattern else 1e-12
    assert_folded_is_unfolded(*make_twins(pattern, **settings), deep_samples(seed), limit=limit)


def test_norm_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own recomputation of it runs only with TransformerEngine."""
    stock, _ = make_twins("G-G*", **GPT)
    _, tree = make_twins("G-G*", **GPT, recompute_granularity="selective", recompute_modules=["gdn_norm_out"])
    tree.load_state_dict(stock.state_dict())
    norms, original = [], GatedDeltaNet._apply_gated_norm
    monkeypatch.setattr(
        type(tree.decoder.layers[0].self_attention),
        "_apply_gated_norm",
        lambda *given: norms.append(1) or original(*given),
    )
    assert_folded_is_unfolded(stock, tree, deep_samples(6))
    assert len(norms) == 2 + 2 * 2


@pytest.mark.parametrize("settings", [{}, RECOMPUTE["layers"], MOE], ids=["plain", "full recompute", "experts"])
def test_gpt_with_states_in_three_of_four_layers(settings: dict[str, Any]) -> None:
    config = tiny_config(num_layers=4, **DELTA_NET | GPT | settings)
    stock, tree = with_long_memory(twins(config))
    assert [isinstance(layer.self_attention, GatedDeltaNet) for layer in tree.decoder.layers] == [1, 1, 1, 0]
    assert list(tree.state_dict()) == list(stock.state_dict())
    limit = FP32_INSIDE if settings is MOE else 1e-12
    assert_folded_is_unfolded(stock, tree, deep_samples(11), limit=limit)


def test_forest_branches_at_five_levels() -> None:
    levels = Levels.of(batch_of(deep_samples()).packed_seq_params.tree_metadata)
    assert len(levels.levels) > 5
    assert all(level.kept for level in levels.levels[:5])
    lens = {length for level in levels.levels for length in level.lens.tolist()}
    assert {1, 64} <= lens


@pytest.mark.parametrize("deterministic", [False, True])
def test_layer_without_a_tree_is_upstreams(deterministic: bool) -> None:
    stock, tree = make_twins("GG", deterministic_mode=deterministic)
    ids = torch.tensor(deep_samples()[0].tokens.tolist()).unsqueeze(0)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    assert torch.equal(tree(ids, positions, None), stock(ids, positions, None))
    assert list(tree.state_dict()) == list(stock.state_dict())
    assert {type(layer.self_attention).__name__ for layer in tree.decoder.layers} == {"GatedDeltaNet"}


def test_recurrence_of_thousands_of_tokens() -> None:
    """Rounding grows with the length of a path."""
    stock, tree = make_twins("G")
    rng = torch.Generator().manual_seed(3)
    stem, *leaves = (torch.randint(0, 61, (n,), generator=rng).tolist() for n in (4100, 70, 1, 200))
    samples = [Sample(tokens=stem + leaf, loss_mask=[1.0] * len(stem + leaf)) for leaf in leaves]
    assert_folded_is_unfolded(stock, tree, samples, limit=1e-10)


@pytest.mark.parametrize("padding", [0, 1, 70])
def test_padding_changes_nothing(padding: int) -> None:
    _, tree = make_twins("GG")
    samples = deep_samples(12)
    expected = None
    for extra in (3, padding):
        layout = fold(samples, padded_size=fold(samples).physical_tokens + extra)
        loss = supervised(tree, MicroBatch.from_layout(layout), WeightedSum(fused=False))
        loss.backward()
        found = take_gradients(tree)
        if expected is not None:
            assert_same_gradients(found, expected, 1e-14)
        expected = found


def test_layer_follows_levels_with_functions_of_fla() -> None:
    stock, tree = make_twins("G*")
    tree.decoder.layers[0].self_attention.gated_delta_rule = lambda *_, **__: pytest.fail("FLA's rule was called")
    samples = deep_samples(13)
    with fla_in_torch() as calls:
        assert_folded_is_unfolded(stock, tree, samples)
    levels = len(Levels.of(batch_of(samples).packed_seq_params.tree_metadata).levels)
    assert calls["chunk_gated_delta_rule_bwd_dhu"] == levels


def test_fla_without_its_functions_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with fla_in_torch():
        monkeypatch.setattr(gdn, "chunk_gated_delta_rule", lambda *_, **__: None)
        make_tree("G")
        monkeypatch.delattr(sys.modules[RULE], "chunk_fwd_o")
        with pytest.raises(
            ImportError, match=r"takes flash-linear-attention 0\.4\.2 to .* in chunk_fwd_o; pip install"
        ):
            make_tree("G")
        monkeypatch.setattr(gdn, "chunk_gated_delta_rule", gdn.torch_chunk_gated_delta_rule)
        make_tree("G")


def test_deterministic_attention_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's kernels do not give the same bits twice."""
    _, tree = make_twins("G")
    layer = tree.decoder.layers[0].self_attention
    layer.gated_delta_rule = lambda *_, **__: pytest.fail("FLA was called")
    monkeypatch.setattr(gdn, "causal_conv1d", layer.gated_delta_rule)
    layout = fold(deep_samples())
    tree_forward(tree, MicroBatch.from_layout(layout, deterministic_attention=True))


def test_missing_fla_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "HAVE_FLA", False)
    with pytest.raises(
        ImportError, match=r"^layers of Gated DeltaNet need flash-linear-attention, which is not installed; pip"
    ):
        make_tree("G")


def test_more_than_one_row_is_refused() -> None:
    _, tree = make_twins("G")
    batch = batch_of(deep_samples())
    with pytest.raises(ValueError, match="a folded micro-batch has batch size 1, not 2"):
        tree.decoder.layers[0].self_attention(
            torch.zeros(batch.layout.padded_size, 2, 32, dtype=torch.float64),
            None,
            packed_seq_params=batch.packed_seq_params,
        )


def test_a_built_layer_follows() -> None:
    stock, tree = make_twins("G")
    follow_trees(stock)
    batch = batch_of(deep_samples())
    assert torch.equal(tree_forward(stock, batch), tree_forward(tree, batch))
