from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_prefix_tree.cpu.specs import Norm, cpu_spec
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


def test_norms_reject_unsupported_settings() -> None:
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma"):
        Norm(config(normalization="RMSNorm", layernorm_zero_centered_gamma=True), 8)
    with pytest.raises(ValueError, match="L2Norm"):
        Norm(config(normalization="L2Norm"), 8)


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
