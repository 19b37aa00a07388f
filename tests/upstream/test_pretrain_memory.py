"""The dry run's estimate of activations: against autograd's memory of a real model, and the recipes' models by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.models import build_chunks, tiny_gpt_config
from harness.worlds import Layout
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.cpu.launcher import single_process
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.mcore import with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.megatron_lm.activation_memory import activation_bytes, warm_up_bytes
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_router_load_balancing_type": "none",
}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 48,
    "rope_type": "rope",
}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CORE_ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BATCH = fold([Sample(tokens=[*range(50), *[last] * 100]) for last in range(3)])
TOKENS = BATCH.physical_tokens


def config_of(**changes: Any) -> TransformerConfig:
    settings = {"hidden_size": 128, "ffn_hidden_size": 384, "kv_channels": 64, "normalization": "LayerNorm"}
    # Fused, as on a GPU: one function keeps only its input.
    return tiny_gpt_config(
        layout=Layout(), dtype=torch.float32, **(settings | {"bias_activation_fusion": True} | changes)
    )


def kept_by_autograd(config: TransformerConfig) -> int:
    """Bytes of all tensors that the forward pass of a micro-batch leaves, but for weights and tables of angles."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    (model,) = build_chunks(config, with_prefix_tree(cpu_spec(layer, config)))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape[1:-1] != (1, 1):
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tree_forward(model, MicroBatch.from_layout(BATCH, attention_backend="path"))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu, "bias_activation_fusion": False},
        CORE_ATTENTION,
        FULL,
        EXPERTS,
        EXPERTS | MOE,
        LATENT,
        LATENT | {"qk_layernorm": True},
        LATENT | {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    ],
    ids=["dense", "no gate", "core_attn", "full", "experts", "moe", "latent", "latent norms", "mla_up_proj"],
)
def test_layer_keeps_the_estimated_bytes(changes: dict[str, Any]) -> None:
    """By the difference of four layers to two, so that embedding and head do not count."""
    with cpu_emulation(force=True), single_process():
        two, four = (config_of(num_layers=layers, **changes) for layers in (2, 4))
        kept = kept_by_autograd(four) - kept_by_autograd(two)
    estimate = activation_bytes(four, TOKENS, micro_batches=1) - activation_bytes(two, TOKENS, micro_batches=1)
    # Indices and probabilities of the router are not counted.
    assert 0.95 * kept <= estimate <= kept


def qwen3_30b_a3b(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "ffn_hidden_size": 6144,
        "gated_linear_unit": True,
        "qk_layernorm": True,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    }
    return TransformerConfig(**(settings | changes))


# Bytes of a token in a layer: the inputs of norms and blocks, projection of 32 + 2 * 4 heads, norm copies, data that
# attention takes and gives; and of eight experts the inputs and outputs of both matrices.
ATTENTION = 2 * (4 * 2048 + 128 * ((32 + 8) + (32 + 4) + (32 + 4) + 32))
EXPERT = 8 * 2 * (2048 + 2 * 768 + 768)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 48 * (ATTENTION + EXPERT)),
        (MOE, 48 * ATTENTION + EXPERT),
        (CORE_ATTENTION, 48 * (ATTENTION + EXPERT)),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}, 48 * ATTENTION + EXPERT),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
         48 * (ATTENTION + EXPERT) - 47 * 8 * 2 * 768),
        (FULL, 48 * 2 * 2048 + ATTENTION + EXPERT),
        (FULL | {"recompute_num_layers": 4}, 12 * 2 * 2048 + 4 * (ATTENTION + EXPERT)),
        # The first 4 layers of each of two stages, and one of them again.
        (FULL | {"recompute_method": "block", "recompute_num_layers": 4},
         8 * 2 * 2048 + 41 * (ATTENTION + EXPERT)),
        # A dense layer before three of experts.
        ({"moe_layer_freq": [0, 1, 1, 1] * 12}, 48 * ATTENTION + 36 * EXPERT + 12 * 2 * 3 * 6144),
    ],
)  # fmt: skip
def test_recomputed_activations_are_not_kept(changes: dict[str, Any], layers: int) -> None:
    assert activation_bytes(qwen3_30b_a3b(**changes), 16384, micro_batches=8) == pytest.approx(layers * 16384 / 2)


def test_fewer_micro_batches_than_stages_and_interleaved_ones() -> None:
    plain = activation_bytes(qwen3_30b_a3b(), 1000, micro_batches=8)
    assert activation_bytes(qwen3_30b_a3b(), 1000, micro_batches=1) == plain / 2
    interleaved = qwen3_30b_a3b(virtual_pipeline_model_parallel_size=2)
    assert activation_bytes(interleaved, 1000, micro_batches=8) == pytest.approx(1.25 * plain)


def test_without_stages_the_head_counts() -> None:
    one = qwen3_30b_a3b(pipeline_model_parallel_size=1)
    layers = activation_bytes(qwen3_30b_a3b(), 1000, micro_batches=8)
    assert activation_bytes(one, 1000, micro_batches=8) == layers + 1000 / 2 * 2 * 2 * 2048
    with_logits = activation_bytes(one, 1000, micro_batches=8, logits_width=151936)
    assert with_logits == layers + 1000 / 2 * 4 * (2048 + 151936)


def test_the_warm_up_of_llama_8b() -> None:
    """For 16 samples of 32,768 tokens, TP=4: an input of 3.5 GiB and two outputs of half of that, with a gate."""
    arguments = {
        "seq_length": 32768,
        "micro_batch_size": 16,
        "context_parallel_size": 1,
        "ffn_hidden_size": 14336,
        "tensor_model_parallel_size": 4,
        "hidden_size": 4096,
        "sequence_parallel": True,
        "bf16": True,
    }
    assert warm_up_bytes(SimpleNamespace(**arguments, swiglu=True)) == 2 * 3.5 * 2**30
    assert warm_up_bytes(SimpleNamespace(**arguments, swiglu=False)) == 3 * 3.5 * 2**30
    # Without it residuals are full: two inputs and two outputs of 4 GiB.
    whole = SimpleNamespace(**arguments | {"sequence_parallel": False}, swiglu=True)
    assert warm_up_bytes(whole) == 4 * 4 * 2**30
