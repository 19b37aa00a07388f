"""Reward models on Hugging Face folders: transformers' ``...ForSequenceClassification`` in and out.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from harness.commands import run_command

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
import transformers
from hf_folders import saved_model
from hf_jobs import (
    PP2,
    STILL,
    TP2_SP,
    assert_same_folder,
    run_ranks,
    saved_classifier,
    weights_in,
    worst_reward,
    write_reward_job,
)
from transformers.models.auto import modeling_auto

from mcore_prefix_tree.settings.hf_families import COMPARED
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

pytestmark = pytest.mark.usefixtures("megatron_bridge")


@pytest.mark.parametrize(
    "layout", [(), pytest.param(TP2_SP, marks=pytest.mark.slow), pytest.param(PP2, marks=pytest.mark.slow)]
)
def test_classifier_in_and_out(layout: tuple[str, ...], tmp_path: Path) -> None:
    recipe, source, scores = write_reward_job(tmp_path), tmp_path / "source", tmp_path / "scores.jsonl"
    model = saved_classifier(source)
    exported = tmp_path / "exported"
    options = ("--hf", str(source), *layout, STILL)
    for arguments in (
        ("score", recipe, *options, "--output", str(scores)),
        ("train", recipe, *options, f"checkpoint.export_hf={exported}"),
    ):
        if layout:
            run_ranks(2, *arguments, code=0)
        else:
            run_command(*arguments, code=0)
    assert worst_reward(scores, model) <= 1e-5
    assert_same_folder(exported, source)


@pytest.mark.parametrize("family", ["Llama 3", "Qwen3"])
def test_language_model_becomes_a_classifier(family: str, tmp_path: Path) -> None:
    """Qwen3 has tied embeddings: its folder has no head whose place the scalar one could take."""
    recipe, source, exported = write_reward_job(tmp_path), tmp_path / "source", tmp_path / "exported"
    saved_model(family, source, {}, max_shard_size="100KB")
    saved = f"checkpoint.save={tmp_path / 'run'}"
    trained = run_command("train", recipe, "--hf", source, saved, f"checkpoint.export_hf={exported}", code=0)
    assert "with a new scalar head" in trained.output
    kind = "LlamaForSequenceClassification" if family == "Llama 3" else "Qwen3ForSequenceClassification"
    config = transformers.AutoConfig.from_pretrained(exported)
    assert (config.architectures, config.num_labels) == ([kind], 1)
    model = getattr(transformers, kind)(config).float().eval()
    model.load_state_dict(weights_in(exported))
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights_in(exported).keys()
    for options in (["--hf", str(source), saved], ["--hf", str(exported)]):
        scores = tmp_path / f"{len(options)}.jsonl"
        run_command("score", recipe, *options, "--output", scores, code=0)
        assert worst_reward(scores, model) <= 1e-5


@pytest.mark.parametrize("kind", COMPARED)
def test_classifiers_have_the_names_of_transformers(kind: str) -> None:
    """For some families transformers has none, and the exported folder a name by the same rule."""
    named = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    folder = {name: {} for name in ("files", "dtypes", "shapes")}
    for name in filter(None, (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], named)):
        config = {"architectures": [name]}
        found = HuggingFaceFolder(path=Path(), config=config, has_chat_template=False, **folder)
        assert found.architecture == modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        assert found.classifier == named or named is None


@pytest.mark.parametrize(
    ("objective", "labels", "says"),
    [
        ("sft", 1, "ends in a scalar head, and objective.name=sft needs a vocabulary"),
        ("reward_model", 3, "has 'score.weight' of shape [3, 64]; a scalar head has one row of the hidden size"),
    ],
)
def test_classifiers_that_do_not_fit(objective: str, labels: int, says: str, tmp_path: Path) -> None:
    recipe = write_reward_job(tmp_path)
    saved_classifier(tmp_path / "source", labels)
    refused = run_command("verify", recipe, "--hf", tmp_path / "source", f"objective.name={objective}", code=2)
    assert says in " ".join(refused.output.split())


def test_language_model_has_no_reward_to_score_with(tmp_path: Path) -> None:
    recipe = write_reward_job(tmp_path)
    saved_model("Llama 3", tmp_path / "source", {})
    refused = run_command("score", recipe, "--hf", tmp_path / "source", "--output", tmp_path / "scores.jsonl", code=2)
    assert "has no scalar head to score with; set checkpoint.save" in " ".join(refused.output.split())
