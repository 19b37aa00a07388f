"""Gated DeltaNet along a tree; ``test_folded_is_unfolded.py`` holds it to the stock layer on each sample by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.fla_in_torch import RULE, fla_in_torch
from harness.in_double import kept_double
from harness.seam_models import DELTA_NET, deep_samples, hybrid, hybrid_twins, tiny_config, twins, with_long_memory
from harness.seam_runs import assert_folded_is_unfolded, batch_of

from mcore_prefix_tree import fold
from mcore_prefix_tree.mcore import with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET
from mcore_prefix_tree.mcore.seam.levels import Levels
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

if not HAS_DELTA_NET:
    pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19", allow_module_level=True)

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn

from mcore_prefix_tree.cpu.hybrid import hybrid_stack

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

GPT = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


def make_twins(pattern: str, **settings: Any) -> tuple[Any, Any]:
    return with_long_memory(hybrid_twins(tiny_config(**DELTA_NET | settings | {"num_layers": len(pattern)}), pattern))


def make_tree(pattern: str) -> Any:
    return hybrid(tiny_config(**DELTA_NET | {"num_layers": len(pattern)}), pattern, with_prefix_tree(hybrid_stack))


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
    assert len(norms) == 2 * 2  # of two layers, forward and again


def test_gpt_has_states_in_three_of_four_layers() -> None:
    tree = twins(tiny_config(num_layers=4, **DELTA_NET | GPT))[1]
    assert [isinstance(layer.self_attention, GatedDeltaNet) for layer in tree.decoder.layers] == [1, 1, 1, 0]


def test_forest_branches_at_five_levels() -> None:
    levels = Levels.of(batch_of(deep_samples()).packed_seq_params.tree_metadata)
    assert len(levels.levels) > 5
    assert all(level.kept for level in levels.levels[:5])
    lens = {length for level in levels.levels for length in level.lens.tolist()}
    assert {1, 64} <= lens


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
