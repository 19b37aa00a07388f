"""Models that Megatron-Bridge makes of Hugging Face folders fold inside, with transformers' outputs.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.marks import mostly_in_ci

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
from bridge_models import compare_by_token, logged, refused, refused_core, refused_settings, run, run_in_double
from harness.worlds import Layout, world
from hf_folders import folder_of, rows
from hf_jobs import OWN_LAYERS

from mcore_prefix_tree.attention.api import AUTO


def check(results: list[Any], logits: list[np.ndarray]) -> None:
    for result in results:
        assert result["report"]["fold/fold_ratio"] > 1.5
        for name in ("alone", "together"):
            for found, expected in zip(result[name], logits, strict=True):
                assert np.abs(found - expected).max() <= 1e-5 * max(1, np.abs(expected).max()), name
        worst = max(result["errors"], key=result["errors"].get)
        assert result["errors"][worst] <= 1e-5, worst


@pytest.mark.parametrize(
    "family", mostly_in_ci("Qwen3-MoE", "Nemotron-H", of=["Llama 3", "Qwen3", "Qwen3-MoE", "DeepSeek-V3", "Nemotron-H"])
)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder, logits = folder_of(family, tmp_path)
    check(world(1).run(run, folder, rows(), Layout(), layout=Layout()), logits)


@pytest.mark.parametrize("family", [*OWN_LAYERS, "Granite 4 dense"])
def test_rows_in_double_precision(family: str, tmp_path: Path) -> None:
    folder, logits = folder_of(family, tmp_path)
    results = world(1).run(run_in_double, folder, rows(), Layout(), layout=Layout())
    check(results, logits)
    (result,) = results
    assert max(result["errors"].values()) <= 1e-12
    for alone, together in zip(result["alone"], result["together"], strict=True):
        assert np.abs(alone - together).max() <= 1e-12


def test_rows_in_the_precision_of_its_recipes(tmp_path: Path) -> None:
    """bfloat16: the model that folds and the stock one round, but not at the same places."""
    folder, _ = folder_of("Qwen3", tmp_path)
    (result,) = world(1).run(run, folder, rows(), Layout(), AUTO, torch.bfloat16, layout=Layout())
    for alone, together in zip(result["alone"], result["together"], strict=True):
        assert np.linalg.norm(together - alone) <= 2e-2 * np.linalg.norm(alone)
    assert max(result["errors"].values()) <= 5e-2


@pytest.mark.parametrize(
    ("settings", "inside", "says"),
    [
        ({"sequence_parallel": True}, {}, "does not add up gradients of per_layer_input_gate"),
        ({"recompute_granularity": "full"}, {}, "cannot recompute layers with embeddings of their own"),
        ({"tensor_model_parallel_size": 2}, {}, "set qk_layernorm=True"),
        ({}, {"max_tokens": 8}, "does not support a decoder whose forward Megatron-Bridge has replaced"),
    ],
)
def test_settings_of_layers_that_it_names_itself(
    settings: dict[str, Any], inside: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder, _ = folder_of("Gemma 4 E2B", tmp_path)
    (said,) = world(1).run(refused_settings, folder, settings, inside, layout=Layout())
    assert says in said


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("Qwen3", Layout(tp=2, sequence_parallel=True), id="qwen3-tp2-sp"),
        pytest.param("Qwen3-MoE", Layout(ep=2), id="qwen3-moe-ep2", marks=pytest.mark.ci),
    ],
)
def test_rows_in_layouts(family: str, layout: Layout, tmp_path: Path) -> None:
    folder, logits = folder_of(family, tmp_path)
    check(world(2).run(run, folder, rows(), layout, layout=layout), logits)


@pytest.mark.parametrize("kind", ["lora", "dora", "canonical_lora"])
def test_dropout_of_its_adapters_is_refused_in_training(kind: str, tmp_path: Path) -> None:
    folder, _ = folder_of("Llama 3", tmp_path)
    (said,) = world(1).run(refused, folder, rows(), kind, layout=Layout())
    (sentence,) = said
    assert "decoder.layers.0.self_attention.linear_" in sentence
    assert "dropout has p=0.1" in sentence


def test_attention_that_caps_scores_is_refused() -> None:
    (said,) = world(1).run(refused_core, layout=Layout())
    assert "does not support Gemma2DotProductAttention as core attention" in said


def test_attention_that_norms_all_heads_together() -> None:
    """``check_first`` compares rows and gradients."""
    (ratio,) = world(1).run(compare_by_token, [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7]], layout=Layout())
    assert ratio > 1.3


def test_its_log_gains_the_report() -> None:
    (found,) = world(1).run(logged, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]], layout=Layout())
    assert found["lm loss"] == 2
    assert found["fold/micro_batches"] == 1  # not the evaluation's
    assert (found["fold/logical_tokens"], found["fold/unique_tokens"], found["fold/fold_ratio"]) == (12, 6, 2)
    assert found["fold/expected_speedup"] > 1
