"""``model.lora`` and ``model.adapter``: settings from PEFT's folders, and rejected folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.hf_sources import hf_recipe, write_config, write_tensors

from mcore_prefix_tree.settings import RecipeError

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "lora_dropout": 0.1,
    "target_modules": ["v_proj", "q_proj"],
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "megatron_core": "megatron.core",
}
LAYERS = [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "v_proj")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers of square matrices, and an adapter of rank 2."""
    made = tmp_path / "source"
    made.mkdir()
    write_config(made)
    write_tensors(made / "model.safetensors", [f"{layer}.weight" for layer in LAYERS], shape=(2, 2))
    write_adapter(tmp_path)
    return made


def write_adapter(tmp_path: Path, layers: list[str] = LAYERS, **changes: Any) -> None:
    (tmp_path / "adapter").mkdir(exist_ok=True)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    names = [f"base_model.model.{layer}.lora_{one}.weight" for layer in layers for one in "AB"]
    write_tensors(tmp_path / "adapter" / "adapter_model.safetensors", names, shape=(2, 2))


def adapter_of(folder: Path) -> str:
    return f"model.adapter={folder.parent / 'adapter'}"


def test_adapter_decides_rank_scale_and_layers(folder: Path) -> None:
    lora = hf_recipe(folder, adapter_of(folder)).model.lora
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (2, 6, ["q_proj", "v_proj"])
    assert hf_recipe(folder).model.lora is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3; adapters are LORA"),
        ({"use_dora": True}, "use_dora=True, which adapters here do not compute"),
        ({"use_rslora": True}, "use_rslora=True, which"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"bias": "all"}, "bias=all, which"),
        ({"something_new": 3}, "something_new=3, which"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa, with which PEFT changes"),
        ({"r": 2.5}, "r=2.5; expected a positive integer"),
        ({"target_modules": "all-linear"}, "target_modules=all-linear; expected a list of q_proj"),
        ({"target_modules": ["lm_head"]}, "target_modules=['lm_head']; expected a list of"),
        ({"r": 3}, "of shape [2, 2], and"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight' of shape [2, 2], and"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "has no layer 'o_proj'; remove it from"),
    ],
)
def test_adapters_that_are_rejected(changes: dict[str, Any], says: str, folder: Path) -> None:
    write_adapter(folder.parent, **changes)
    with pytest.raises(RecipeError) as error:
        hf_recipe(folder, adapter_of(folder))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_adapters_that_are_incomplete(folder: Path) -> None:
    write_adapter(folder.parent, LAYERS[:3])
    with pytest.raises(RecipeError, match=r"model\.layers\.1\.self_attn\.v_proj\.lora_A\.weight' of shape None, and"):
        hf_recipe(folder, adapter_of(folder))
    weights = folder.parent / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(RecipeError, match="download it again"):
        hf_recipe(folder, adapter_of(folder))
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(RecipeError, match=r"adapter_model\.bin, a pickle, which can run code"):
        hf_recipe(folder, adapter_of(folder))
    with pytest.raises(RecipeError, match=r"model\.adapter: .* is not a folder with an adapter_config\.json"):
        hf_recipe(folder, "model.adapter=nowhere")


TARGETS = "model.lora.target_modules=[q_proj]"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.lora.r=4"], "model.lora.r=4, but"),
        ([TARGETS, "model.transformer.fp8=hybrid"], "model.lora with model.transformer.fp8 is not proven yet"),
        (
            [TARGETS, "model.transformer.cuda_graph_impl=transformer_engine", "batch.length_buckets=[65536]"],
            "model.lora with model.transformer.cuda_graph_impl is not proven yet",
        ),
        (["model.lora.lora_dropout=0.1"], "model.lora.lora_dropout: samples that share a token would share its mask"),
        ([TARGETS, "objective.name=critic"], "trains no scalar head, which objective.name=critic needs"),
        ([TARGETS, "checkpoint.pretrained_checkpoint=runs/a"], "export the checkpoint and name that folder there"),
        (["model.lora.target_modules=[embed_tokens]"], "model.lora.target_modules"),
    ],
)
def test_recipes_that_are_at_odds(overrides: list[str], says: str, folder: Path) -> None:
    of_adapter = [] if overrides[0] == TARGETS or "dropout" in overrides[0] else [adapter_of(folder)]
    with pytest.raises(RecipeError) as error:
        hf_recipe(folder, *of_adapter, *overrides)
    assert says in str(error.value)


def test_adapters_of_experts(folder: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(2)]
    write_tensors(folder / "model.safetensors", names, shape=(2, 2))
    with pytest.raises(RecipeError, match="adapters of experts are not supported; remove 'up_proj' from"):
        hf_recipe(folder, "model.lora.target_modules=[up_proj]")
