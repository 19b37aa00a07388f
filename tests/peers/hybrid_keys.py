"""Contents of a hybrid model's checkpoint, with the local stack for CPUs and with upstream's of TransformerEngine.

Prints both, by kind of model, as JSON: keys and shapes of all tensors. TransformerEngine is a stand-in.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import te_stand_in  # noqa: F401  before Megatron-Core
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_prefix_tree.cpu.emulation import enable, single_process
from mcore_prefix_tree.cpu.hybrid import hybrid_stack
from mcore_prefix_tree.mcore.seam.layer_specs import with_prefix_tree

COMMON: dict[str, Any] = {
    **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True},
    **{"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False},
    **{"hidden_dropout": 0, "attention_dropout": 0},
}
EXPERTS: dict[str, Any] = {
    **{"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 16},
    **{"moe_router_load_balancing_type": "none"},
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
MODELS = {
    "dense": ("*-*-", TransformerConfig(**COMMON)),
    "experts": ("*E*E", TransformerConfig(**COMMON, **EXPERTS)),
    "latent": ("+-+-", MLATransformerConfig(**COMMON, **LATENT, multi_latent_attention=True)),
}


def upstreams() -> Any:
    """Return upstream's stack; the stand-in has no grouped experts, whose tensors are those of single ones."""
    stack = copy.deepcopy(hybrid_stack_spec)
    experts = get_moe_module_spec(use_te=True, num_experts=4, moe_grouped_gemm=False)
    stack.submodules.moe_layer.submodules.mlp = experts
    return stack


def saved(stack: Any, pattern: str, config: Any) -> dict[str, list[int]]:
    model = HybridModel(
        config,
        stack,
        vocab_size=64,
        max_sequence_length=64,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    tensors = [value for value in model.sharded_state_dict().values() if hasattr(value, "global_shape")]
    return {tensor.key: list(tensor.global_shape) for tensor in tensors if "_extra_state" not in tensor.key}


if __name__ == "__main__":
    enable()
    with single_process():
        model_parallel_cuda_manual_seed(1)
        found = {
            name: [saved(stack, *model) for stack in (upstreams(), with_prefix_tree(upstreams()), hybrid_stack)]
            for name, model in MODELS.items()
        }
    print(json.dumps(found))
