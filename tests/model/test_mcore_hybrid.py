"""Hybrid models: the fused head, and layers that cannot follow a tree."""

from __future__ import annotations

from typing import Any

import pytest
from harness.marks import quick
from harness.oracles import worst
from harness.seam_models import VOCAB, hybrid, hybrid_twins, tiny_config
from harness.seam_runs import WARM, assert_same_gradients, batch_of, supervised, take_gradients, unfolded

from mcore_prefix_tree.mcore import with_edge_head, with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.outputs import Logprobs, WeightedSum
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.hybrid_layers import LAYERS, check_pattern
from mcore_prefix_tree.mcore.seam.validation import check_model

if not HAS_HYBRID_MODEL:
    pytest.skip("this megatron-core has no HybridModel", allow_module_level=True)

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_prefix_tree.cpu.hybrid import hybrid_stack

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


@pytest.mark.parametrize("readout", [WeightedSum(), Logprobs(entropy=True)], ids=str)
@pytest.mark.parametrize("tied", quick(True, of=[False, True]), ids=["tied", "untied"])
def test_fused_head_takes_no_output_processor(readout: Any, tied: bool) -> None:
    stock, tree = hybrid_twins(tiny_config(num_layers=4), "*-*-", share_embeddings_and_output_weights=tied)
    expected = unfolded(stock, WARM)
    loss = supervised(with_edge_head(tree), batch_of(WARM, only_supervised=True), readout)
    loss.backward()
    assert worst(loss.detach(), expected["loss"]) < 1e-12
    assert_same_gradients(take_gradients(tree), expected["grads"], 1e-12)


def test_fused_head_makes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tree = hybrid_twins(tiny_config(num_layers=2), "*-")
    model, batch = with_edge_head(tree), batch_of()
    seen = []
    monkeypatch.setattr(model, "_scale_logits", lambda answer: seen.append(tuple(answer.shape)) or answer)
    tree_forward(model, batch, WeightedSum())
    (shape,) = seen
    assert shape[-1] < VOCAB


def test_the_table_knows_every_letter_of_upstream() -> None:
    assert set(LAYERS) >= Symbols.VALID_LAYERS


REFUSED = {
    "*-/X": r"X \(a layer that this package does not know\) in ",
    "XY*": r"X \(a layer that .*\) nor Y \(a layer that .*\) in .* 'XY\*'; use \* \(attention",
    "*X": r"X \(a layer that this package does not know\)",
}
if not HAS_SPARSE_ATTENTION:
    REFUSED["D-"] = r"D \(DeepSeek sparse attention: it follows a tree since megatron-core 0\.19\)"


@pytest.mark.parametrize("pattern", REFUSED)
def test_other_layers_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^prefix-tree training does not support {REFUSED[pattern]}") as said:
        check_pattern(pattern)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("pattern", ["*-*-", "*E|*E", "+-+E", "M-M*", "*-/", "*-|*/*-/*-", "", "-"])
def test_layers_that_follow_a_tree_are_accepted(pattern: str) -> None:
    check_pattern(pattern)


def test_stack_rejects_settings_before_building_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerLayer, "__init__", lambda *_, **__: pytest.fail("built a layer"))
    monkeypatch.setitem(LAYERS, "*", LAYERS["*"]._replace(refused="of this test"))
    with pytest.raises(NotImplementedError, match=r"support \* \(attention: of this test"):
        hybrid(tiny_config(num_layers=3), "-*-", with_prefix_tree(hybrid_stack))


def test_a_model_is_refused_on_every_pipeline_stage() -> None:
    """By its full pattern, for any layers of this stage."""
    _, tree = hybrid_twins(tiny_config(num_layers=2), "*-")
    check_model(tree)
    tree.hybrid_layer_pattern = "*-|X-"
    with pytest.raises(NotImplementedError, match=r"support X \(a layer that"):
        check_model(tree)


def test_upstreams_own_spec_is_taken() -> None:
    """The stack is TransformerEngine's, which is not installed: nothing is built."""
    tree = with_prefix_tree(hybrid_stack_spec)
    assert issubclass(tree.module, HybridStack)
    assert tree.module.__name__ == "HybridStack"
    assert tree.submodules is hybrid_stack_spec.submodules
    assert with_prefix_tree(tree) == tree
