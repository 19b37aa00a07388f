"""Recipes of hybrid models: ``model.hybrid_layer_pattern``."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.commands import run_command
from harness.train_jobs import assert_resumes

from mcore_prefix_tree.mcore.loop.session import session
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.hybrid_layers import LAYERS
from mcore_prefix_tree.plan import ModelWork
from mcore_prefix_tree.plan.model_shape import PATTERN_PARTS
from mcore_prefix_tree.settings import RecipeError, load_recipe

needs_hybrid = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="HybridModel came with megatron-core 0.18")

EXPERTS = "{num_moe_experts: 4, moe_router_topk: 2, moe_ffn_hidden_size: 24}"
STATES = "{linear_key_head_dim: 8, linear_value_head_dim: 8, linear_num_key_heads: 2, linear_num_value_heads: 4}"
SPARSE = (
    "{multi_latent_attention: true, q_lora_rank: 12, kv_lora_rank: 10, qk_head_dim: 8, qk_pos_emb_head_dim: 4, "
    "v_head_dim: 6, original_max_position_embeddings: 8, dsa_indexer_n_heads: 2, dsa_indexer_head_dim: 8, "
    "dsa_indexer_topk: 6, dsa_indexer_rotate_activation: false, dsa_indexer_scoring_relu: false}"
)
SSM = "{mamba_state_dim: 8, mamba_head_dim: 8, mamba_num_groups: 2, mamba_num_heads: 4}"


def pattern_options(pattern: str, transformer: str = "{}") -> list[str]:
    layers = len(pattern.replace("|", ""))
    return [f"model.hybrid_layer_pattern='{pattern}'", f"model.num_layers={layers}", f"model.transformer={transformer}"]


@needs_hybrid
@pytest.mark.parametrize(
    ("pattern", "transformer"),
    [("*E-", EXPERTS), ("G-*", STATES), ("M-*", SSM), ("D-D", SPARSE)],
    ids=["experts", "Gated DeltaNet", "Mamba", "sparse attention"],
)
def test_other_layers_pass_verification(pattern: str, transformer: str, job: Path) -> None:
    if LAYERS[pattern[0]].refused is not None:
        pytest.skip("Gated DeltaNet and sparse attention follow a tree since megatron-core 0.19")
    groups = ["model.num_query_groups=null"] if transformer == SPARSE else []
    result = run_command("verify", job, *pattern_options(pattern, transformer), *groups, code=0)
    assert "TOO LARGE" not in result.output


@needs_hybrid
def test_training_resumes(job: Path, tmp_path: Path) -> None:
    assert_resumes(job, tmp_path, *pattern_options("*-"), stop_after=4, interval=2)


def test_flops_are_those_of_the_layers(job: Path) -> None:
    """A GPT's layer is an attention and an MLP of a pattern."""
    gpt, hybrid, attention = (
        ModelWork.from_model(load_recipe(job, options).model)
        for options in ([], pattern_options("*-*-"), pattern_options("****"))
    )
    assert hybrid == gpt
    assert attention.layers == 2 * gpt.layers
    assert attention.token < gpt.token


def test_every_letter_that_follows_a_tree_has_its_flops() -> None:
    assert LAYERS.keys() == PATTERN_PARTS.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.hybrid_layer_pattern='*-*'"], "has 3 layers, not model.num_layers=2"),
        (pattern_options("*X"), "has the letter X; Megatron knows [*] "),
        (pattern_options("*E"), "has layers of experts, E, but no model.transformer.num_moe_experts"),
        (pattern_options("+-"), "multi-latent attention, [+] and D, and .* come together"),
        (pattern_options("D-"), "multi-latent attention, [+] and D, and .* come together"),
        ([*pattern_options("*-"), "model.rope_scaling=true"], "has no model.rope_scaling"),
    ],
)
def test_contradictions_are_reported_before_megatron_is_imported(options: list[str], message: str, job: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(job, options)


@needs_hybrid
@pytest.mark.parametrize(
    ("options", "message"),
    [(pattern_options("*|-|*"), "has 3 pipeline stages, but parallel asks for 1; put [|] between")],
)
def test_patterns_that_cannot_be_trained_are_refused(options: list[str], message: str, job: Path) -> None:
    with pytest.raises(RecipeError, match=message), session(load_recipe(job, options)):
        pass


@needs_hybrid
def test_sizes_that_megatron_refuses_end_in_a_sentence(job: Path) -> None:
    sizes = SSM.replace("mamba_num_heads: 4", "mamba_num_heads: 3")
    result = run_command("train", job, *pattern_options("M-", sizes), code=2)
    assert "error: megatron-core refuses this model: nheads must be evenly divisible by ngroups" in result.output
