"""An unfolded side that does not fit raises an error instead of running out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train_jobs import batch_of, resolved, train, world_of_one
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from mcore_prefix_tree.mcore.engine import unfolded
from mcore_prefix_tree.mcore.engine.unfolded import why_stock_does_not_fit
from mcore_prefix_tree.mcore.models.config_fields import DTYPES
from mcore_prefix_tree.settings import Dtype, Recipe, RecipeError, load_recipe

TOKENS, HEADS, GROUPS = 128, 4, 2
FP32_SOFTMAX, HALF_SOFTMAX = ({"attention_softmax_in_fp32": value} for value in (True, False))


def recipe_of(job: Path, dtype: str, implementation: str = "local", **transformer: Any) -> Recipe:
    recipe = load_recipe(job)
    model = replace(recipe.model, dtype=dtype, transformer_impl=implementation, transformer=transformer)
    return replace(recipe, model=model)


@pytest.mark.parametrize(
    ("dtype", "transformer", "expected"),
    [
        ("float64", FP32_SOFTMAX, 8),
        ("float32", FP32_SOFTMAX, 4),
        ("bfloat16", FP32_SOFTMAX, 6),
        ("bfloat16", HALF_SOFTMAX, 2),
    ],
)
def test_memory_per_score_equals_megatrons(
    job: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, transformer: dict[str, bool], expected: int
) -> None:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == HEADS * TOKENS**2:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with world_of_one(recipe_of(job, dtype, **transformer)) as place:
        attention = DotProductAttention(
            place.config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
        )
        q, k, v = (
            torch.randn(TOKENS, 1, heads, 8).to(place.config.params_dtype).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attention(q, k, v, None)
        assert unfolded._bytes_per_score(place.config) == expected == sum(kept.values()) / (HEADS * TOKENS**2)


# Of the job's longest sample, in its two layers and two more.
SCORES = 4 * HEADS * 15**2
LOCAL, ENGINE = "Megatron's local attention", "TransformerEngine's attention in float32"


@pytest.mark.parametrize(
    ("dtype", "implementation", "companion", "needed", "whose"),
    [
        ("float64", "local", None, 8 * SCORES, LOCAL),
        ("float64", "local", "float32", 8 * SCORES, LOCAL),
        ("float32", "local", None, 4 * SCORES, LOCAL),
        ("float32", "local", "float64", 8 * SCORES, LOCAL),
        ("bfloat16", "local", None, 6 * SCORES, LOCAL),
        ("bfloat16", "local", "float32", 6 * SCORES, LOCAL),
        ("float32", "transformer_engine", None, 4 * SCORES, ENGINE),
        ("bfloat16", "transformer_engine", "float32", 4 * SCORES, ENGINE),
        ("bfloat16", "transformer_engine", None, 0, ENGINE),
    ],
)
def test_memory_limit_is_exact_to_the_byte(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    implementation: str,
    companion: Dtype | None,
    needed: int,
    whose: str,
) -> None:
    samples = batch_of(load_recipe(job), 1)
    assert max(map(len, samples)) == 15
    with world_of_one(recipe_of(job, dtype)) as place:
        run = resolved(recipe_of(job, dtype), place)
        of_layers = replace(run.job, is_local=implementation == "local")
        for available, fits in ((needed, True), (needed - 1, False)):
            monkeypatch.setattr(unfolded, "available_bytes", lambda device, held=available: held)
            obstacle = why_stock_does_not_fit(
                samples, of_layers, companion=None if companion is None else DTYPES[companion]
            )
            if fits or not needed:
                assert obstacle is None
            else:
                assert obstacle is not None
                assert obstacle.startswith(f"{whose} needs about 0 GiB for the 15 tokens of {job.parent}/data.jsonl:")


def test_verify_reports_missing_memory_in_one_sentence(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfolded, "available_bytes", lambda device: 0)
    with pytest.raises(RecipeError, match=r"^verify cannot run the unfolded side: .*, and 0 GiB are available; "):
        train(job, "verify.enabled=true")


def test_comparison_skips_an_unfolded_side_beyond_memory(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfolded, "available_bytes", lambda device: 0)
    (comparison,) = train(job, "compare=true", "train_iters=2").comparisons
    assert comparison.stock is None
    assert comparison.stock_missing.startswith(LOCAL)
