from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_prefix_tree.cpu.launcher import single_process
from mcore_prefix_tree.cpu.specs import Norm, cpu_spec, exchanged
from mcore_prefix_tree.mcore.models.config_fields import settings_of_run
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig


def config(**changes: object) -> TransformerConfig:
    return TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=2, **changes)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_equal_torchs_and_exchange_weights(kind: str) -> None:
    stock = WrappedTorchNorm(config(normalization=kind), 8, eps=1e-6)
    ours = Norm(config(normalization=kind), hidden_size=8, eps=1e-6, persist_layer_norm=False)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(3, 8)
    assert torch.equal(ours(x), stock(x))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_mark_partial_gradients(sequence_parallel: bool) -> None:
    settings = {"sequence_parallel": sequence_parallel, "tensor_model_parallel_size": 2, "params_dtype": torch.float64}
    norm = Norm(config(normalization="LayerNorm", **settings), 8)
    assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel] * 2
    assert {p.dtype for p in norm.parameters()} == {torch.float64}


def test_norms_reject_unsupported_settings() -> None:
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma"):
        Norm(config(normalization="RMSNorm", layernorm_zero_centered_gamma=True), 8)
    with pytest.raises(ValueError, match="L2Norm"):
        Norm(config(normalization="L2Norm"), 8)


def test_a_spec_is_copied_with_every_norm_exchanged() -> None:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    before = repr(spec)
    changed = exchanged(spec, {WrappedTorchNorm: Norm})
    assert repr(spec) == before
    layer, attention = changed.submodules, changed.submodules.self_attention.submodules
    assert layer.input_layernorm is layer.pre_mlp_layernorm is Norm
    assert attention.q_layernorm is attention.k_layernorm is Norm
    assert repr(layer.mlp) == repr(spec.submodules.mlp)
    assert attention.core_attention is spec.submodules.self_attention.submodules.core_attention
    assert "WrappedTorchNorm" not in repr(changed)


def test_a_block_has_its_final_norm_exchanged() -> None:
    with single_process():
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        block = get_gpt_decoder_block_spec(config(normalization="RMSNorm"), use_transformer_engine=False)
        before = repr(block)
        parallel = config(sequence_parallel=True, tensor_model_parallel_size=2)
        from_layer, from_block = cpu_spec(layer, parallel), cpu_spec(block, parallel)
    assert repr(block) == before
    for made in (from_layer, from_block):
        assert isinstance(made, TransformerBlockSubmodules)
        assert made.layer_norm is Norm
        assert len(made.layer_specs) == 3
        assert "WrappedTorchNorm" not in repr(made)


def test_layers_that_run_anyway_stay_as_they_are() -> None:
    layer = get_gpt_layer_local_spec()
    assert cpu_spec(layer, config()) is layer


@pytest.mark.parametrize(("on_gpu", "chunks", "fixed"), [(False, 2, True), (False, None, False), (True, 2, False)])
def test_interleaved_stages_keep_outputs_that_gloo_may_still_be_sending(
    on_gpu: bool, chunks: int | None, fixed: bool
) -> None:
    """A recipe decides it, also if Megatron-Bridge's provider would free them."""
    parallel = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks)
    found = settings_of_run(ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=2), parallel, on_gpu=on_gpu)
    assert found.get("deallocate_pipeline_outputs") is (False if fixed else None)
