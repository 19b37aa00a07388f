"""Models that Megatron-Bridge makes of Hugging Face folders fold inside, and answer what transformers answers.

Needs Megatron-Bridge, and with it Python 3.12: see requirements-bridge.txt.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
import transformers
from bridge_models import read_back, run
from harness.worlds import Layout, world

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
    "num_hidden_layers": 3,
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


def folder_of(family: str, where: Path) -> tuple[str, list[np.ndarray]]:
    """Write random weights, and return their folder and transformers' own logits of each row."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(where)
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits[0].numpy() for row in rows()]
    return str(where), logits


def check(results: list[Any], logits: list[np.ndarray]) -> None:
    for result in results:
        assert result["report"]["fold/fold_ratio"] > 1.5
        for name in ("alone", "together"):
            for found, expected in zip(result[name], logits, strict=True):
                assert np.abs(found - expected).max() <= 1e-5 * max(1, np.abs(expected).max()), name
        worst = max(result["errors"], key=result["errors"].get)
        assert result["errors"][worst] <= 1e-5, worst


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder, logits = folder_of(family, tmp_path)
    check(world(1).run(run, folder, rows(), Layout(), layout=Layout()), logits)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("Qwen3", Layout(tp=2, sequence_parallel=True), id="qwen3-tp2-sp"),
        pytest.param("Qwen3Moe", Layout(ep=2), id="qwen3-moe-ep2"),
    ],
)
def test_rows_in_layouts(family: str, layout: Layout, tmp_path: Path) -> None:
    folder, logits = folder_of(family, tmp_path)
    check(world(2).run(run, folder, rows(), layout, layout=layout), logits)


def test_checkpoints_name_the_spec() -> None:
    assert world(1).run(read_back, layout=Layout()) == ["TreeSelfAttention"]
