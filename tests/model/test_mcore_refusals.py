"""Settings that folding does not support, for example dropout, are rejected by name; nothing else changes."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.seam_models import (
    GRAPHS,
    REFUSED_EXPERT_SETTINGS,
    REFUSED_SETTINGS,
    build,
    config_with,
    ids_of,
    local_spec,
    tiny_config,
    twins,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.layout import row_multiple
from mcore_prefix_tree.mcore import TreePackedSeqParams, local_layer_spec, te_layer_spec, with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import forward_step, tree_forward
from mcore_prefix_tree.mcore.outputs import WeightedSum
from mcore_prefix_tree.mcore.release import HAS_DEPTHS, HAS_HYBRID_MODEL, NEEDS_DEPTHS
from mcore_prefix_tree.mcore.seam import layer_specs
from mcore_prefix_tree.mcore.seam.core_attention import TreeCoreAttentionMixin, TreeSelfAttentionMixin
from mcore_prefix_tree.mcore.seam.latent_attention import check_rotary_keys
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.packed_seq_params import get_tree_params
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees
from mcore_prefix_tree.mcore.seam.validation import _refusals, check_config, check_model

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


def batch(*lengths: int, **options) -> MicroBatch:
    samples = [Sample(tokens=[1, 2, *([3 + index] * (length - 2))]) for index, length in enumerate(lengths or (4, 6))]
    return MicroBatch.from_layout(fold(samples), **options)


@pytest.mark.parametrize("setting", REFUSED_SETTINGS, ids=ids_of(REFUSED_SETTINGS))
def test_settings_are_refused_by_name(setting):
    with pytest.raises(NotImplementedError, match="does not support ") as raised:
        check_config(config_with(**setting))
    assert [*setting][-1] in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("setting", REFUSED_EXPERT_SETTINGS, ids=ids_of(REFUSED_EXPERT_SETTINGS))
def test_unsupported_expert_settings_are_rejected_by_name(setting):
    check_config(config_with(**setting))
    with pytest.raises(NotImplementedError, match="does not support ") as raised:
        check_config(config_with(num_moe_experts=4, **setting))
    assert [*setting][-1] in str(raised.value)


def test_every_refusal_is_tested_here():
    triggered = set()
    for setting in REFUSED_SETTINGS + REFUSED_EXPERT_SETTINGS:
        refusals = _refusals(config_with(num_moe_experts=4, **setting))
        hits = [index for index, (applies, _) in enumerate(refusals) if applies]
        assert len(hits) == 1, setting
        triggered.update(hits)
    assert triggered == set(range(len(refusals)))


def test_several_refusals_come_in_one_message():
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.1.*; nor hidden_dropout=0\.2"):
        check_config(config_with(attention_dropout=0.1, hidden_dropout=0.2))


def test_supported_settings_are_accepted():
    check_config(tiny_config())
    check_config(config_with(num_moe_experts=4, moe_router_load_balancing_type="none"))
    check_config(config_with(**GRAPHS))


@pytest.mark.parametrize(
    "setting",
    [{"attention_dropout": 0.1}, {"hidden_dropout": 0.1}, {"window_size": (4, 1)}],
    ids=lambda setting: next(iter(setting)),
)
def test_building_a_model_refuses_before_any_forward(setting):
    config = config_with(**setting)
    build(config, local_spec(config))  # stock has no objection
    with pytest.raises(NotImplementedError, match=next(iter(setting))):
        build(config, with_prefix_tree(local_spec(config)))


def test_dropout_that_only_a_layer_asks_for_is_refused():
    model = build(tiny_config(), with_prefix_tree(local_spec(tiny_config())))
    model.decoder.layers[1].self_attention.core_attention.attention_dropout.p = 0.25
    with pytest.raises(NotImplementedError, match=r"layers\.1\..*attention_dropout has p=0\.25"):
        tree_forward(model, batch())


# Calls that a forward rejects.


def test_a_mask_with_a_tree_is_refused():
    _, tree = twins(tiny_config())
    folded = batch()
    mask = torch.zeros(1, 1, folded.layout.padded_size, folded.layout.padded_size, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask must be None with a folded micro-batch"):
        tree(folded.input_ids, folded.position_ids, mask, packed_seq_params=folded.packed_seq_params)


def layer_and_hidden(batch_size: int = 1):
    _, tree = twins(tiny_config(), position_embedding_type="none")
    folded = batch()
    hidden = torch.zeros(folded.layout.padded_size, batch_size, tree.config.hidden_size, dtype=torch.float64)
    return tree.decoder.layers[0].self_attention, hidden, folded.packed_seq_params


def test_a_bias_with_a_tree_is_refused():
    attention, hidden, params = layer_and_hidden()
    bias = torch.zeros(1, 1, len(hidden), len(hidden), dtype=torch.float64)
    with pytest.raises(ValueError, match="attention_bias must be None with a folded micro-batch"):
        attention(hidden, None, attention_bias=bias, packed_seq_params=params)


def test_a_batch_of_two_with_a_tree_is_refused():
    attention, hidden, params = layer_and_hidden(batch_size=2)
    with pytest.raises(ValueError, match="has batch size 1, not 2; set micro_batch_size=1"):
        attention(hidden, None, packed_seq_params=params)


def test_a_rotary_table_shorter_than_the_longest_path_is_refused():
    _, tree = twins(tiny_config())
    folded = batch(6, 9)
    params = dataclasses.replace(folded.packed_seq_params, max_seqlen_q=5, max_seqlen_kv=5)
    with pytest.raises(ValueError, match="rotary table has 5 positions but the longest path has 9 tokens"):
        tree(folded.input_ids, folded.position_ids, None, packed_seq_params=params)


def test_learned_positions_past_the_table_are_refused_on_the_host():
    config = tiny_config()
    model = {"position_embedding_type": "learned_absolute", "max_sequence_length": 8}
    _, tree = twins(config, **model)
    assert tree_forward(tree, batch(8, 8)).shape == (1, 14, 61)  # longer than the table, but no path is
    with pytest.raises(ValueError, match=r"a path of 9 tokens .*max_position_embeddings=8"):
        tree_forward(tree, batch(9, 3))


def test_a_schedule_that_averages_micro_batches_is_refused():
    config = tiny_config(calculate_per_token_loss=False)
    model = build(config, with_prefix_tree(local_spec(config)))
    with pytest.raises(ValueError, match=r"^calculate_per_token_loss=False .* set calculate_per_token_loss=True"):
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, readout=WeightedSum(fused=False)),
            data_iterator=iter([batch()]),
            model=model,
            num_microbatches=1,
            seq_length=8,
            micro_batch_size=1,
            forward_only=False,
        )


def test_three_dimensional_positions_are_refused():
    config = config_with(mrope_section=[1, 1, 2])
    model = build(config, with_prefix_tree(local_spec(config)), position_embedding_type="mrope")
    with pytest.raises(NotImplementedError, match="position_embedding_type='mrope'"):
        check_model(model)


def test_only_params_with_a_tree_are_a_tree():
    params = batch().packed_seq_params
    assert get_tree_params(params) is params
    assert get_tree_params(None) is None
    assert get_tree_params(PackedSeqParams(qkv_format="sbhd")) is None
    assert get_tree_params(TreePackedSeqParams()) is None
    assert params.qkv_format == "sbhd"
    assert params.max_seqlen_q == params.max_seqlen_kv == 8  # of 6, so that few tables are kept
    assert isinstance(params, PackedSeqParams)


# Specs.


def attention_of(spec: ModuleSpec):
    return spec.submodules.self_attention


def test_with_prefix_tree_changes_the_layer_and_not_its_input():
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    before = repr(spec)
    tree = with_prefix_tree(spec)
    assert repr(spec) == before
    assert issubclass(tree.module, TransformerLayer)
    assert tree.submodules is spec.submodules


def first_attention(spec, **settings):
    return build(tiny_config(**settings), spec).decoder.layers[0].self_attention


@pytest.mark.parametrize("built", [False, True], ids=["from a spec", "when it is built"])
def test_a_layer_follows(built):
    if built:
        model = build(tiny_config(), local_spec(tiny_config()))
        follow_trees(model)
        attention = model.decoder.layers[0].self_attention
    else:
        attention = first_attention(with_prefix_tree(local_spec(tiny_config())))
    assert isinstance(attention, TreeSelfAttentionMixin)
    assert isinstance(attention, SelfAttention)
    assert type(attention).__name__ == "SelfAttention"
    assert isinstance(attention.core_attention, TreeCoreAttentionMixin)
    assert isinstance(attention.core_attention, DotProductAttention)


def test_following_again_changes_nothing():
    model = build(latent_config(), local_spec(latent_config()))
    follow_trees(model)
    attention = model.decoder.layers[0].self_attention
    classes, rotary = [type(module) for module in model.modules()], attention.rotary_pos_emb
    follow_trees(model)
    assert [type(module) for module in model.modules()] == classes
    assert attention.rotary_pos_emb is rotary


def test_another_core_attention_follows_too():
    """Megatron-Bridge exchanges it under attention_backend=local after the layer was built."""
    model = build(tiny_config(), with_prefix_tree(local_spec(tiny_config())))
    attention = model.decoder.layers[0].self_attention
    attention.core_attention = DotProductAttention(tiny_config(), 1, AttnMaskType.causal, "self")
    follow_trees(model)
    assert isinstance(attention.core_attention, TreeCoreAttentionMixin)
    assert attention.core_attention.tree_window is None


@pytest.mark.parametrize("block", [False, True])
def test_with_prefix_tree_can_be_applied_twice(block):
    spec = get_gpt_layer_local_spec()
    spec = TransformerBlockSubmodules(layer_specs=[spec] * 2) if block else spec
    once = with_prefix_tree(spec)
    assert with_prefix_tree(once) == once
    assert once != spec


def test_equal_bases_give_the_same_class():
    first, second = (first_attention(with_prefix_tree(local_spec(tiny_config()))) for _ in range(2))
    assert type(first) is type(second)
    assert type(first).__qualname__ == "TreeSelfAttention"


def test_subclasses_of_attention_are_followed():
    class MySelfAttention(SelfAttention):
        pass

    class MyCore(DotProductAttention):
        pass

    spec = get_gpt_layer_local_spec()
    attention_of(spec).module = MySelfAttention
    attention_of(spec).submodules.core_attention = MyCore
    attention = first_attention(with_prefix_tree(spec))
    assert isinstance(attention, MySelfAttention)
    assert isinstance(attention.core_attention, MyCore)
    assert isinstance(attention.core_attention, TreeCoreAttentionMixin)


@pytest.mark.parametrize(("name", "width"), [("linear_kv_down_proj", 24), ("linear_qkv_down_proj", 36)])
def test_rotary_keys_without_upstream_gradients_are_rejected(name, width):
    config = tiny_config(
        multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=20, qk_pos_emb_head_dim=4, num_query_groups=4
    )

    def attention(rows):
        return SimpleNamespace(config=config, **{name: SimpleNamespace(weight=torch.empty(rows, config.hidden_size))})

    check_rotary_keys(attention(width))
    with pytest.raises(NotImplementedError, match=rf"multi_latent_attention with tensor_model_parallel_size.* {name} "):
        check_rotary_keys(attention(width // 2))


def latent_config(**changes):
    settings = {"multi_latent_attention": True, "num_query_groups": 4, "rope_type": "rope", "q_lora_rank": 12}
    return tiny_config(**settings | changes)


def test_a_spec_of_another_attention_is_refused_for_a_latent_model():
    """GPTModel would make no rotary embedding, and no layer either."""
    with pytest.raises(NotImplementedError, match="take a spec made with multi_latent_attention=True"):
        build(latent_config(), layer_specs.gpt_layer_local)
    build(latent_config(), with_prefix_tree(local_spec(latent_config())))


def test_frequency_table_of_an_old_checkpoint_is_ignored():
    stock, tree = twins(latent_config())
    old = stock.state_dict()
    for layer in range(len(stock.decoder.layers)):
        old[f"decoder.layers.{layer}.self_attention.rotary_pos_emb.inv_freq"] = torch.zeros(4)
    for model in (stock, tree):
        model.load_state_dict(dict(old), strict=True)


@pytest.mark.skipif(HAS_DEPTHS, reason="of older releases")
def test_multi_token_prediction_of_an_older_release_is_refused():
    config = tiny_config(mtp_num_layers=1)
    spec = get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), use_transformer_engine=False)
    with pytest.raises(NotImplementedError, match=NEEDS_DEPTHS):
        with_prefix_tree(spec)
    with pytest.raises(NotImplementedError, match=rf"mtp_num_layers=1: .* {NEEDS_DEPTHS}"):
        check_config(config)


class Other(torch.nn.Module):
    """Mixes tokens in a way that nobody knows."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def test_cross_attention_is_refused():
    spec = get_gpt_layer_local_spec()
    spec.submodules.cross_attention = ModuleSpec(module=Other)
    with pytest.raises(NotImplementedError, match=r"cross-attention \(Other\), which layer 1 has"):
        build(tiny_config(), with_prefix_tree(spec))


class Scaled(TransformerLayer):
    """Changes what its layers compute outside of them, as Megatron-Bridge's of Gemma 4."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_cuda_graphs_of_a_layer_with_another_forward_are_refused():
    """A replay calls attention and the graph of the rest, not the layer's forward."""
    config, spec = config_with(**GRAPHS), get_gpt_layer_local_spec()
    spec.module = Scaled
    with pytest.raises(
        NotImplementedError, match="in layer 1, a Scaled whose forward is not Megatron-Core's; set cuda"
    ):
        follow_trees(build(config, spec))
    config.cuda_graph_impl = "none"
    follow_trees(build(config, spec))


def test_another_self_attention_is_refused():
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = ModuleSpec(module=Other)
    with pytest.raises(NotImplementedError, match="does not support Other as self-attention, in layer 1: use one of"):
        build(tiny_config(), with_prefix_tree(spec))


def test_a_core_attention_with_another_forward_is_refused():
    """For example Megatron-Bridge's of Gemma 2, which caps scores, and of Ministral 3, which scales queries."""

    class Capped(DotProductAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs).tanh()

    spec = get_gpt_layer_local_spec()
    attention_of(spec).submodules.core_attention = Capped
    with pytest.raises(NotImplementedError, match="Capped as core attention, in layer 1: trees would not have what"):
        build(tiny_config(), with_prefix_tree(spec))


@pytest.mark.parametrize("name", ["forward", "get_query_key_value_tensors"])
def test_an_attention_with_other_methods_has_to_say_that_it_follows(name):
    def method(self, *args, **kwargs):
        return getattr(SelfAttention, name)(self, *args, **kwargs)

    class Own(SelfAttention):
        pass

    setattr(Own, name, method)
    spec = get_gpt_layer_local_spec()
    attention_of(spec).module = Own
    with pytest.raises(NotImplementedError, match=rf"layer 1 has a Own whose {name} is not .* follows_prefix_trees = "):
        build(tiny_config(), with_prefix_tree(spec))
    Own.follows_prefix_trees = True
    tree_forward(build(tiny_config(), with_prefix_tree(spec)), batch())


def test_an_attention_outside_a_layer_is_refused():
    model = build(tiny_config(), local_spec(tiny_config()))
    model.reader = CrossAttention.__new__(CrossAttention)
    torch.nn.Module.__init__(model.reader)
    with pytest.raises(NotImplementedError, match="reader is a CrossAttention, which does not follow a tree"):
        follow_trees(model)


def test_another_router_is_refused():
    config = tiny_config(num_moe_experts=4, moe_router_load_balancing_type="none", moe_ffn_hidden_size=16)
    model = build(config, local_spec(config))
    model.decoder.layers[0].mlp.router = Other()
    with pytest.raises(NotImplementedError, match="needs a TopKRouter in layer 1, not a Other"):
        follow_trees(model)


def test_a_stock_model_is_refused_a_tree():
    model = build(tiny_config(), local_spec(tiny_config()))
    with pytest.raises(NotImplementedError, match=r"SelfAttention does not follow a tree; call follow_trees\(model\)"):
        tree_forward(model, batch())
    follow_trees(model)
    tree_forward(model, batch())


def test_layers_that_are_no_transformer_layers_are_refused():
    with pytest.raises(NotImplementedError, match="layers of class IdentityOp"):
        with_prefix_tree(ModuleSpec(module=IdentityOp))
    blocks = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec(), ModuleSpec(module=IdentityOp)])
    with pytest.raises(NotImplementedError, match="layers of class IdentityOp"):
        with_prefix_tree(blocks)


@pytest.mark.skipif(HAS_HYBRID_MODEL, reason="this megatron-core has HybridModel")
def test_mamba_stack_error_names_the_required_megatron_core():
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    with pytest.raises(NotImplementedError, match=r"layers of class MambaStack.*with megatron-core 0\.18"):
        with_prefix_tree(mamba_stack_spec)


@pytest.mark.parametrize("spec", [None, SelfAttention, "gpt_layer_local"])
def test_other_types_than_specs_raise_type_error(spec):
    with pytest.raises(TypeError, match="with_prefix_tree takes a ModuleSpec"):
        with_prefix_tree(spec)


@pytest.mark.parametrize(
    "name", ["gpt_layer_local", "gpt_layer_local_qk_layernorm", "gpt_layer_te", "gpt_layer_te_qk_layernorm"]
)
def test_specs_for_the_command_line_are_names_of_the_module(name):
    """Megatron-LM reads ``vars(module)[name]``."""
    assert isinstance(vars(layer_specs)[name], ModuleSpec)


def test_the_local_specs_are_megatrons():
    # Newer megatron-core has functools.partial in specs, which equals nothing but itself: compare their reprs.
    assert repr(layer_specs.gpt_layer_local) == repr(with_prefix_tree(get_gpt_layer_local_spec()))
    with_norms = with_prefix_tree(get_gpt_layer_local_spec(qk_layernorm=True))
    assert repr(layer_specs.gpt_layer_local_qk_layernorm) == repr(with_norms)
    rms_norm = {"normalization": "RMSNorm"}
    assert repr(local_layer_spec(**rms_norm)) == repr(with_prefix_tree(get_gpt_layer_local_spec(**rms_norm)))


def test_missing_transformer_engine_is_reported(monkeypatch):
    monkeypatch.setattr(layer_specs, "_have_te", lambda: False)
    with pytest.raises(ImportError, match=r"needs TransformerEngine, which is not installed.*gpt_layer_local"):
        te_layer_spec(qk_layernorm=True)
    with pytest.raises(ImportError, match="needs TransformerEngine, which is not installed"):
        build(tiny_config(), layer_specs._te_spec())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_micro_batches_in_fp8_have_upstreams_alignment_on_each_rank(recipe):
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    config = config_with(fp8="hybrid", fp8_recipe=recipe)
    check_config(config)
    aligned = get_align_size_for_quantization(config)
    assert row_multiple(1, config.fp8, config.fp8_recipe) == aligned
    assert row_multiple(4, config.fp8, config.fp8_recipe) == 4 * aligned
    assert row_multiple(4, None, recipe) == 4
    with pytest.raises(NotImplementedError, match="fp8='hybrid' in layers that compute without it"):
        check_model(build(config, local_spec(config)))


def test_recomputation_waits_for_no_lock_of_a_killed_process(tmp_path, monkeypatch, caplog):
    """torch's lock of a compilation is a file that outlives its process."""
    lock = tmp_path / "cache" / "py312_cpu" / "share_storage_ext" / "lock"
    lock.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    selective = tiny_config(recompute_granularity="selective", recompute_modules=["core_attn"])
    check_config(selective)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "cache")
    lock.touch()
    check_config(selective)
    own = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    assert own.is_dir()
    assert tmp_path not in own.parents
    assert f"{lock} is of a compilation that runs or was killed: this process compiles in {own}" in caplog.text
    check_config(selective)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(own)
