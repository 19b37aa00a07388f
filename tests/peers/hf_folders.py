"""Tiny random models in Hugging Face folders, made from transformers' own configurations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
# So many heads of an indexer that no key's score is exactly 0, and ties with another's.
SPARSE: dict[str, Any] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 32, "n_group": 1}
GEMMA4_31B: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
GEMMA4_E2B: dict[str, Any] = GEMMA4_31B | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4: dict[str, Any] = GEMMA4_31B | {
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
DELTA_NET: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
STATE_SPACE: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_floor": 0.05,  # initial steps are far above time_step_min, to which transformers raises steps
}
GRANITE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 48,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "rms_norm_eps": 1e-5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models by transformers' own classes, whose names begin with ``name``; and a tiny model's settings."""

    name: str
    settings: dict[str, Any]
    config: str | None = None

    @property
    def has_experts(self) -> bool:
        return not self.settings.keys().isdisjoint({"num_experts_per_tok", "top_k_experts"})


FAMILIES = {
    "Llama 3": Family(name="Llama", settings=SIZES | {"rope_parameters": LLAMA3}),
    "Qwen2.5": Family(name="Qwen2", settings=SIZES),
    "Qwen3": Family(name="Qwen3", settings=SIZES | {"tie_word_embeddings": True}),
    "Qwen3-MoE": Family(name="Qwen3Moe", settings=SIZES | EXPERTS),
    "Qwen3.5": Family(name="Qwen3_5", config="Qwen3_5Text", settings=SIZES | DELTA_NET),
    "Qwen3.5-MoE": Family(
        name="Qwen3_5Moe",
        config="Qwen3_5MoeText",
        settings=SIZES | EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 48},
    ),
    "Qwen3-Next": Family(
        name="Qwen3Next", settings=SIZES | EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 48}
    ),
    "GLM-4.5": Family(
        name="Glm4Moe",
        settings=SIZES
        | EXPERTS
        | {"n_routed_experts": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "use_qk_norm": True},
    ),
    "GLM-4.7-Flash": Family(name="Glm4MoeLite", settings=SIZES | LATENT),
    "GLM-5": Family(
        name="GlmMoeDsa", settings=SIZES | LATENT | SPARSE | {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    ),
    "DeepSeek-V3": Family(name="DeepseekV3", settings=SIZES | LATENT),
    "DeepSeek-V3.2": Family(name="DeepseekV32", settings=SIZES | LATENT | SPARSE | {"n_group": 2}),
    "gpt-oss": Family(
        name="GptOss", settings=SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    ),
    "Gemma 3": Family(
        name="Gemma3",
        config="Gemma3Text",
        settings=SIZES
        | {"num_hidden_layers": 6, "sliding_window": 4, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "Gemma 4": Family(name="Gemma4", config="Gemma4Text", settings=SIZES | GEMMA4),
    "Gemma 4 E2B": Family(name="Gemma4", config="Gemma4Text", settings=SIZES | GEMMA4_E2B),
    "Gemma 4 31B": Family(name="Gemma4", config="Gemma4Text", settings=SIZES | GEMMA4_31B),
    "Granite 4": Family(
        name="GraniteMoeHybrid", settings=SIZES | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Granite 4 dense": Family(
        name="GraniteMoeHybrid", settings=SIZES | GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"}
    ),
    "Hy3": Family(name="HYV3", settings=SIZES | EXPERTS | {"num_shared_experts": 1, "num_hidden_layers": 4}),
    "MiniMax M2": Family(name="MiniMaxM2", settings=SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mistral": Family(name="Mistral", settings=SIZES | {"sliding_window": None}),
    "Nemotron-H": Family(
        name="NemotronH",
        settings=SIZES
        | STATE_SPACE
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"moe_shared_expert_intermediate_size": 48},
    ),
    "OLMoE": Family(
        name="Olmoe", settings=SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    ),
}


def rows() -> list[list[int]]:
    """Two groups with stems within them, a duplicate, a strict prefix, and a row that shares nothing."""
    rng = np.random.default_rng(0)
    found: list[list[int]] = []
    for _ in range(2):
        prompt, stem = rng.integers(2, VOCAB, size=9).tolist(), rng.integers(2, VOCAB, size=3).tolist()
        found += [[*prompt, *(stem if i % 2 else []), *rng.integers(2, VOCAB, size=3 + i).tolist()] for i in range(3)]
    return [*found, found[0], found[1][:5], rng.integers(2, VOCAB, size=6).tolist()]


def saved_model(family: str, where: Path, settings: Mapping[str, Any], *, seed: int = 0, **options: Any) -> Any:
    """Write random weights to a folder, and return transformers' model of them."""
    torch.manual_seed(seed)
    kind = FAMILIES[family]
    config = getattr(transformers, f"{kind.config or kind.name}Config")(**copy.deepcopy(kind.settings | settings))
    model = getattr(transformers, f"{kind.name}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        # A step of any size changes the bits of a zero.
        parameter.data = torch.where(parameter.data == 0, 0.1 * torch.randn_like(parameter), parameter.data)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(where, **options)
    return model


def folder_of(family: str, where: Path) -> tuple[str, list[np.ndarray]]:
    """Write random weights, and return their folder and transformers' own logits of each row."""
    model = saved_model(family, where, {})
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits[0].numpy() for row in rows()]
    return str(where), logits
