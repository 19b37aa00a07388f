"""The seam on one forest; ``test_folded_is_unfolded.py`` compares all kinds of models with the stock ones."""

from __future__ import annotations

import pytest
import torch
from harness.models import Trainer
from harness.oracles import worst
from harness.seam_models import LAYERS, local_spec, tiny_config, twins
from harness.seam_runs import (
    FP32_INSIDE,
    GPT2,
    LATENT,
    MOE,
    SAMPLES,
    VARIANTS,
    WINDOWS_AND_SINKS,
    assert_folded_is_unfolded,
    folded_batch,
    sft_forward_step,
    unfolded,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.attention.api import check_case
from mcore_prefix_tree.mcore.engine.backend import attention_case
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.seam.layer_specs import stock_block_spec
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

# Megatron warns about its own deprecations and about missing packages, thousands of times.
pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


def test_the_forest_branches_at_every_level():
    layout = fold(SAMPLES)
    children = [int((layout.node_parent == node).sum()) for node in range(layout.num_nodes)]
    branching, level = [], [0] * layout.num_nodes
    for node, parent in enumerate(layout.node_parent):
        level[node] = level[parent] + 1 if parent >= 0 else 0
        if children[node] > 1:
            branching.append(level[node])
    assert {0, 1, 2, 3} <= set(branching)
    assert len(set(layout.sample_node.tolist())) < layout.num_samples  # duplicates
    assert set(layout.sample_node.tolist()) & set(layout.node_parent.tolist())  # strict prefixes
    assert layout.num_trees >= 4
    assert layout.fold_ratio > 2


@pytest.mark.parametrize("name", ["window", "learnable sinks", "off-by-one"])
def test_windows_and_sinks_change_the_result(name):
    """Else the test above would hold for a back-end that ignored them."""
    with_them, _ = twins(tiny_config(**WINDOWS_AND_SINKS[name]))
    without, _ = twins(tiny_config())
    assert worst(unfolded(with_them)["loss"], unfolded(without)["loss"]) > 1e-5


@pytest.mark.parametrize("name", ["window", "learnable sinks"])
def test_backend_without_options_names_one_with_them(name):
    config = tiny_config(**WINDOWS_AND_SINKS[name])
    _, tree = twins(config)
    with pytest.raises(ValueError, match=r"'path' does not support (window=4|sinks) .*backends that do: .*reference"):
        tree_forward(tree, folded_batch("path"))
    with pytest.raises(ValueError, match=r"'path' does not support (window=4|sinks) .*backends that do: .*reference"):
        check_case("path", attention_case(config, device=torch.device("cpu")))


def test_l2_norm_of_queries_and_keys():
    config = tiny_config(qk_l2_norm=True)
    assert_folded_is_unfolded(*twins(config, local_spec(config, qk_l2_norm=True)), limit=FP32_INSIDE)


# As DeepSeek-V3 chooses its experts; a bias is added to the scores that choose, not to those that weigh.
BIASED_EXPERTS = MOE | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_shared_expert_intermediate_size": 16,
}


def with_expert_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """Biases that change which experts are chosen."""
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    assert len(found) == LAYERS
    generator = torch.Generator().manual_seed(0)
    for bias in found:
        bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))
    return found


def test_latent_attention_and_experts_with_the_biases_of_a_checkpoint():
    stock, tree = twins(tiny_config(**LATENT | BIASED_EXPERTS))
    unbiased = unfolded(stock)["loss"]
    for model in (stock, tree):
        model.zero_grad()
        with_expert_biases(model)
    assert worst(unfolded(stock)["loss"], unbiased) > 1e-3
    assert_folded_is_unfolded(stock, tree, limit=FP32_INSIDE)


def test_a_step_leaves_the_biases_of_experts_as_they_are():
    """With an update rate of zero, which is all that is not refused."""
    _, tree = twins(tiny_config(**BIASED_EXPERTS))
    before = [bias.clone() for bias in with_expert_biases(tree)]
    trainer = Trainer.of([tree])

    def biases_after_a_step():
        trainer.backward(sft_forward_step, [folded_batch()], seq_length=64)
        return [buffer for name, buffer in tree.named_buffers() if name.endswith("expert_bias")]

    assert all(map(torch.equal, biases_after_a_step(), before))
    tree.config.moe_router_bias_update_rate = 1e-3  # else the above would hold for a step that never came to them
    assert not all(map(torch.equal, biases_after_a_step(), before))


def block_submodules(config):
    return TransformerBlockSubmodules(layer_specs=[local_spec(config)] * LAYERS, layer_norm=WrappedTorchNorm)


@pytest.mark.parametrize(
    "make_spec",
    [block_submodules, lambda config: ModuleSpec(module=TransformerBlock, submodules=block_submodules(config))],
    ids=["TransformerBlockSubmodules", "ModuleSpec of a block"],
)
def test_block_specs(make_spec):
    config = tiny_config()
    assert_folded_is_unfolded(*twins(config, make_spec(config)))


@pytest.mark.parametrize("settings", [{}, GPT2, MOE, VARIANTS["heterogeneous"][0], {"qk_layernorm": True}])
def test_checkpoints_move_both_ways(settings):
    stock, tree = twins(tiny_config(**settings))
    assert list(stock.state_dict()) == list(tree.state_dict())
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": torch.distributed.group.WORLD}
    assert stock.sharded_state_dict(metadata=metadata).keys() == tree.sharded_state_dict(metadata=metadata).keys()
    with torch.no_grad():
        for parameter in tree.parameters():
            parameter.mul_(1.5)
    assert not stock.load_state_dict(tree.state_dict(), strict=True).missing_keys
    for (name, ours), theirs in zip(tree.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_rotary_rows_are_gathered_once_per_micro_batch():
    _, tree = twins(tiny_config())
    batch = folded_batch()
    cache = batch.packed_seq_params.tree_metadata.cache
    tree_forward(tree, batch)
    (table,), (rows,) = cache["rotary"]
    assert rows.shape[0] == batch.layout.padded_size
    assert torch.equal(rows, table[batch.position_ids[0]])
    tree_forward(tree, batch)
    assert cache["rotary"][1][0] is rows


def test_few_rotary_tables_are_kept():
    """Upstream keeps the last 32 requested ones: trees of 33 to 64 positions share one."""
    _, tree = twins(tiny_config())
    tree.rotary_pos_emb.forward.cache_clear()
    for longest in range(33, 65):
        layout = fold([Sample(tokens=[1] * longest), Sample(tokens=[1, 2])])
        tree_forward(tree, MicroBatch.from_layout(layout, attention_backend="path"))
    assert tree.rotary_pos_emb.forward.cache_info().currsize == 1


def test_final_norm_avoids_apex_without_rms_norm(monkeypatch):
    """Upstream chooses it by the installed packages; Apex's FusedLayerNorm asserts LayerNorm when a model is built."""

    class FusedLayerNorm:
        pass

    monkeypatch.setattr(gpt_layer_specs, "LNImpl", FusedLayerNorm)
    norms = {}
    for normalization in ("RMSNorm", "LayerNorm"):
        block = stock_block_spec(tiny_config(normalization=normalization), use_transformer_engine=False)
        norms[normalization] = block.layer_norm
    assert norms == {"RMSNorm": WrappedTorchNorm, "LayerNorm": FusedLayerNorm}


def test_l2_norm_of_a_config_is_in_its_block():
    for qk_l2_norm in (False, True):
        block = stock_block_spec(tiny_config(qk_l2_norm=qk_l2_norm), use_transformer_engine=False)
        attention = block.layer_specs[0].submodules.self_attention.submodules
        assert (getattr(attention.q_layernorm, "__name__", None) == "L2Norm") == qk_l2_norm
