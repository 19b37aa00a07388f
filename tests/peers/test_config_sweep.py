"""Every setting of a family's configuration gives transformers' answers, or is refused by name.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
from config_sweep import LIMIT, YARN, config_class, outcome
from harness.commands import run_command
from hf_folders import FAMILIES, LLAMA3
from hf_jobs import LOCAL, STILL, assert_same_folder, weights_in, worst_score, write_job
from safetensors.torch import save_file

from mcore_prefix_tree.settings.hf_families import COMPARED, RENAMED

pytestmark = pytest.mark.usefixtures("megatron_bridge")


def test_compared_families_are_accepted() -> None:
    assert {config_class(family).model_type for family in FAMILIES} == set(COMPARED)


@pytest.mark.parametrize(
    ("name", "architecture", "depth"),
    [("kimi_k2", "DeepseekV3ForCausalLM", ()), ("mimo", "MiMoForCausalLM", ("model.mtp_layers.0.input_proj.weight",))],
)
def test_families_by_another_name(name: str, architecture: str, depth: tuple[str, ...], tmp_path: Path) -> None:
    """A published folder has code, too, which is ignored; the export has the same files, depths included."""
    family = next(one for one in FAMILIES if config_class(one).model_type == RENAMED[name][0])
    recipe, source, model = write_job(tmp_path, family)
    config = {"model_type": name, "architectures": [architecture], "auto_map": {"AutoConfig": "a.B"}}
    config |= {"num_nextn_predict_layers": len(depth)}
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    weights = weights_in(source) | {one: torch.ones(64, 128) for one in depth}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    scores = tmp_path / "scores.jsonl"
    run_command("score", recipe, "--hf", source, "--output", scores, code=0)
    assert worst_score(scores, model) <= LIMIT
    run_command("train", recipe, "--hf", source, STILL, f"checkpoint.export_hf={tmp_path / 'exported'}", code=0)
    assert_same_folder(tmp_path / "exported", source)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("DeepSeek-V3", {"num_experts_per_tok": 1}, "num_experts_per_tok=1, and .* unless it is at least 2"),
        ("DeepSeek-V3", {"num_experts_per_tok": 3}, "chooses groups of experts as transformers does only with two"),
        ("DeepSeek-V3", {"rms_norm_eps": 0.1}, None),
        ("DeepSeek-V3", {"q_lora_rank": None}, "q_lora_rank=None, and .* unless it is at least 1"),
        ("DeepSeek-V3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}}, None),
        (
            "DeepSeek-V3",
            {"rope_parameters": YARN | {"mscale_all_dim": 1.0}},
            "no rotary embeddings with these settings",
        ),
        ("Qwen3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}}, None),
        ("Granite 4", {"time_step_limit": [0.01, 0.5]}, "time_step_limit=.*, and .* unless it is"),
        ("Granite 4", {"rope_parameters": LLAMA3}, "no rotary embeddings with these settings"),
        ("Nemotron-H", {"tie_word_embeddings": True}, "tie_word_embeddings=True, and .* unless it is False"),
        ("Qwen3-MoE", {"num_experts_per_tok": 1}, None),
        ("Qwen3-MoE", {"scoring_func": "sigmoid", "routed_scaling_factor": 2.0}, None),
    ],
)
def test_settings_that_were_wrong(family: str, change: dict[str, Any], says: str | None) -> None:
    found = outcome(family, change)
    if says is None:
        assert isinstance(found, float), found
        assert found <= LIMIT
    else:
        assert isinstance(found, str)
        assert re.search(says, found), found


@pytest.fixture(scope="module", params=["local", "transformer_engine"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Outcomes of every case, of the families that a kind of layers builds."""
    layers, output = request.param, tmp_path_factory.mktemp("sweep") / "outcomes.json"
    families = LOCAL if layers == "local" else [name for name in FAMILIES if name not in LOCAL]
    first = "" if layers == "local" else "import te_stand_in; "
    program = f"{first}import sys, bridge_loaded, config_sweep; config_sweep.write_outcomes(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, layers, str(output), *families]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


@pytest.mark.slow
def test_every_setting_gives_transformers_answers_or_is_refused(outcomes: list[dict[str, Any]]) -> None:
    accepted = [one for one in outcomes if isinstance(one["outcome"], float)]
    assert [one for one in accepted if one["outcome"] > LIMIT] == []
    assert [one for one in outcomes if str(one["outcome"]).startswith("crashed")] == []
    assert {one["family"] for one in accepted if not one["change"]} == {one["family"] for one in outcomes}
    assert len(accepted) > len(outcomes) / 2
