"""Tiny models of pictures and text in Hugging Face folders, and how their answers to text differ from transformers'."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from harness.commands import run_command
from hf_folders import DELTA_NET, EXPERTS, GEMMA4, GEMMA4_E2B, LATENT, SIZES, rows
from hf_jobs import REFERENCE, gradient_errors, gradients, nll, weights_in, worst_score, write_recipe

from mcore_prefix_tree.mcore.loop.jobs import run_once
from mcore_prefix_tree.settings import load_recipe
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
TOWER = {"hidden_size": 32, "intermediate_size": 48}
PIXTRAL = TOWER | {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
QWEN = TOWER | {"depth": 2, "num_heads": 2, "out_hidden_size": SIZES["hidden_size"]}
PARTLY = M_ROPE | {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
GEMMA4_TOWER = TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
# By the first part of their classes' names.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"num_hidden_layers": 6, "sliding_window": 4, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
        TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    ),
    "Gemma4": (GEMMA4 | {"use_bidirectional_attention": "vision", "final_logit_softcapping": 0.1}, GEMMA4_TOWER),
    "Gemma4 E2B": (GEMMA4_E2B, GEMMA4_TOWER),
    "Kimi_K25": (LATENT | {"model_type": "deepseek_v3"}, TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2}),
    "Mistral3": ({"model_type": "mistral", "sliding_window": None}, PIXTRAL | {"image_size": 28, "patch_size": 14}),
    "Qwen2_5_VL": ({"rope_parameters": M_ROPE}, QWEN | {"fullatt_block_indexes": [0]}),
    "Qwen3_5": (DELTA_NET | {"rope_parameters": PARTLY}, QWEN | {"num_position_embeddings": 16}),
    "Qwen3_5Moe": (
        DELTA_NET | EXPERTS | {"rope_parameters": PARTLY, "shared_expert_intermediate_size": 48},
        QWEN | {"num_position_embeddings": 16},
    ),
    "Qwen3VL": (
        {"rope_parameters": M_ROPE | {"mrope_interleaved": True}},
        QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}


def saved_model(family: str, folder: Path) -> Any:
    (text, tower), kind = FAMILIES[family], family.partition(" ")[0]
    torch.manual_seed(0)
    text = SIZES | text
    tied = text["tie_word_embeddings"]
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=tower, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    for parameter in model.parameters():
        # A step of any size changes the bits of a zero.
        parameter.data = torch.where(parameter.data == 0, 0.1 * torch.randn_like(parameter), parameter.data)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def check_text(family: str, folder: Path, *options: str) -> None:
    """Compare scores and gradients of a model's text with transformers'."""
    source, scores, recipe = folder / "source", folder / "scores.jsonl", write_recipe(folder)
    model = saved_model(family, source)
    run_command("score", recipe, "--hf", str(source), "--output", str(scores), REFERENCE, *options, code=0)
    assert worst_score(scores, model) <= 1e-5
    with mock.patch.dict(os.environ):
        found, _ = run_once(load_recipe(recipe, [f"model.hf={source}", REFERENCE, *options]), gradients)
    sum(nll(model, row).sum() for row in rows()).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")
    weights, names = weights_in(folder / "gradients"), HuggingFaceFolder.read(source).names
    assert found.keys() == names.keys()
    assert len(weights) > len(names) + 10
    errors = gradient_errors(found, {name: weights[stored] for name, stored in names.items()})
    assert max(errors.values()) <= 1e-4
