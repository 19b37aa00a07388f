"""Tiny random models in Hugging Face folders, made from transformers' own configurations."""

from __future__ import annotations

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
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Qwen3": SIZES | {"tie_word_embeddings": True},
    "Qwen3Moe": SIZES | EXPERTS,
    "DeepseekV3": SIZES | LATENT,
}


def rows() -> list[list[int]]:
    """Two groups with stems within them, a duplicate, a strict prefix, and a row that shares nothing."""
    rng = np.random.default_rng(0)
    found: list[list[int]] = []
    for _ in range(2):
        prompt, stem = rng.integers(2, VOCAB, size=9).tolist(), rng.integers(2, VOCAB, size=3).tolist()
        found += [[*prompt, *(stem if i % 2 else []), *rng.integers(2, VOCAB, size=3 + i).tolist()] for i in range(3)]
    return [*found, found[0], found[1][:5], rng.integers(2, VOCAB, size=6).tolist()]


def saved_model(family: str, where: Path, **options: Any) -> Any:
    """Write random weights to a folder, and return transformers' model of them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(where, **options)
    return model


def folder_of(family: str, where: Path) -> tuple[str, list[np.ndarray]]:
    """Write random weights, and return their folder and transformers' own logits of each row."""
    model = saved_model(family, where)
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits[0].numpy() for row in rows()]
    return str(where), logits
