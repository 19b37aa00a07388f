"""Text models inside models of pictures and text: trained on text, with the weights for pictures as they were.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
import transformers
from harness.commands import run_command
from hf_jobs import (
    PP2,
    REFERENCE,
    STILL,
    TP2_SP,
    assert_same_folder,
    run_ranks,
    run_with_engine,
    weights_in,
    worst_score,
    write_recipe,
)
from hf_text_models import M_ROPE, check_text, saved_model
from safetensors.torch import save_file

from mcore_prefix_tree.settings import RecipeError, load_recipe
from mcore_prefix_tree.settings.hf_families import TEXT_MODELS
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

pytestmark = pytest.mark.usefixtures("megatron_bridge")
LOCAL = ("Gemma4 E2B", "Kimi_K25", "Mistral3", "Qwen2_5_VL", "Qwen3VL")


@pytest.mark.parametrize("names", TEXT_MODELS.values(), ids=TEXT_MODELS)
def test_text_models_have_no_settings_beyond_their_family(names: tuple[str, str, str]) -> None:
    text, family = (transformers.CONFIG_MAPPING[name]() for name in names[:2])
    assert vars(text).keys() - vars(family).keys() == set()
    architecture = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[names[1]]
    assert architecture == names[2]


@pytest.mark.parametrize("family", LOCAL)
def test_text_has_transformers_scores_and_gradients(family: str, tmp_path: Path) -> None:
    check_text(family, tmp_path)


def test_published_names_of_kimi(tmp_path: Path) -> None:
    """transformers 5.23 saves the text model's layers under another name, and its model_type is transformers'."""
    source, scores, recipe = tmp_path / "source", tmp_path / "scores.jsonl", write_recipe(tmp_path)
    model = saved_model("Kimi_K25", source)
    weights = {name.replace("model.blocks.", "model.layers."): one for name, one in weights_in(source).items()}
    assert any(name.startswith("language_model.model.layers.") for name in weights)
    for file in source.glob("model*"):
        file.unlink()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    (source / "config.json").write_text(json.dumps(config))
    run_command("score", recipe, "--hf", str(source), "--output", str(scores), REFERENCE, code=0)
    assert worst_score(scores, model) <= 1e-5
    run_command("train", recipe, "--hf", str(source), STILL, f"checkpoint.export_hf={tmp_path / 'exported'}", code=0)
    assert_same_folder(tmp_path / "exported", source)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe"])
def test_text_through_layers_of_transformer_engine(family: str, tmp_path: Path) -> None:
    """They need a stand-in and another process."""
    head = ["fused_head=false"] if family == "Gemma4" else []  # whose logits have a cap
    options = ["model.transformer_impl=transformer_engine", *head]
    run_with_engine(
        f"import hf_text_models; hf_text_models.check_text('{family}', pathlib.Path(sys.argv[1]), *{options})", tmp_path
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Qwen3VL", ()),
        pytest.param("Qwen3VL", TP2_SP, marks=pytest.mark.slow),
        pytest.param("Qwen2_5_VL", PP2, marks=pytest.mark.slow),
        pytest.param("Mistral3", TP2_SP, marks=pytest.mark.slow),
    ],
)
def test_weights_for_pictures_are_exported_untouched(family: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    source, exported, recipe = tmp_path / "source", tmp_path / "exported", write_recipe(tmp_path)
    saved_model(family, source)
    arguments = ("train", recipe, "--hf", str(source), f"checkpoint.export_hf={exported}", *layout)
    still = run_ranks(2, *arguments, STILL) if layout else run_command(*arguments, STILL)
    assert (still.code if layout else still.exit_code) == 0, still.err if layout else still.output
    assert_same_folder(exported, source)
    if layout:
        return
    run_command(
        *arguments[:4],
        f"checkpoint.export_hf={tmp_path / 'moved'}",
        "optimizer.lr_decay_style=constant",
        code=0,
    )
    before, after = weights_in(source), weights_in(tmp_path / "moved")
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == before.keys() - HuggingFaceFolder.read(source).names.values()


def test_older_folders_have_the_text_settings_beside_the_others(tmp_path: Path) -> None:
    source, scores, recipe = tmp_path / "source", tmp_path / "scores.jsonl", write_recipe(tmp_path)
    model = saved_model("Qwen2_5_VL", source)
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    older = {**text, **config, "rope_scaling": rope, "rope_theta": M_ROPE["rope_theta"]}
    (source / "config.json").write_text(json.dumps(older))
    run_command("score", recipe, "--hf", str(source), "--output", str(scores), REFERENCE, code=0)
    assert worst_score(scores, model) <= 1e-5


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.lora={r: 2}", "whose text model is trained as a whole; model.lora needs the folder of a model of text"),
        ("objective.name=critic", "objective.name=critic needs the folder of a model of text"),
    ],
)
def test_adapters_and_scalar_heads_are_rejected(setting: str, says: str, tmp_path: Path) -> None:
    saved_model("Qwen3VL", tmp_path / "source")
    with pytest.raises(RecipeError, match=says):
        load_recipe(write_recipe(tmp_path), [f"model.hf={tmp_path / 'source'}", setting])
