"""Adapters on Hugging Face folders: PEFT's format in and out, and PEFT's own answers.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt; and PEFT, see requirements/peers.txt.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.commands import run_command

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
from hf_folders import rows
from hf_jobs import EP2, PP2, STILL, TP2_SP, nll, read_model, run_ranks, weights_in, worst_score, write_job
from safetensors.torch import load_file

from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.step_planner import fold_step
from mcore_prefix_tree.mcore.loop.jobs import run_once
from mcore_prefix_tree.mcore.loop.resolve_recipe import Resolved
from mcore_prefix_tree.mcore.models.bridge import load_bridge
from mcore_prefix_tree.settings import load_recipe

pytestmark = pytest.mark.usefixtures("megatron_bridge")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
TP2 = ("parallel.tensor_model_parallel_size=2",)


def write_adapter(folder: Path, family: str, targets: list[str]) -> tuple[Path, Path, Path, Any]:
    """A recipe, the folder of a model, that of a random adapter, and PEFT's model of both."""
    recipe, source, model = write_job(folder, family)
    torch.manual_seed(1)
    # Random matrices B too, which PEFT otherwise starts at zero.
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.save_pretrained(folder / "adapter")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": True}))
    return recipe, source, folder / "adapter", adapted


def gradients(run: Resolved) -> dict[str, torch.Tensor]:
    """Gradients of the first step's summed loss, converted as adapters are."""
    chunks = run.starting_model(print)
    job = replace(run.job, divides_by_tokens=False)
    step = fold_step(run.first_step(), job)
    assert step.logical_tokens > 1.5 * step.physical_tokens
    run_schedule(chunks, step.micro_batches, job.forward_step)
    trained = [parameter for parameter in chunks[0].parameters() if parameter.requires_grad]
    for parameter in trained:
        assert parameter.grad is not None
        parameter.data = parameter.grad.detach()
        parameter.requires_grad_(False)
    assert run.recipe.model.hf is not None
    bridge = load_bridge(run.recipe.model.hf)
    return {name: weight.clone() for name, weight in bridge.export_adapter_weights(chunks, cpu=True)}


@pytest.mark.parametrize(
    ("family", "targets", "overrides"),
    [
        ("Llama 3", ALL, ()),
        ("Qwen3", ["v_proj", "up_proj"], ("model.transformer.recompute_granularity=full", *(
            "model.transformer.recompute_method=uniform", "model.transformer.recompute_num_layers=1"
        ))),
        pytest.param("Qwen2.5", ["q_proj", "v_proj"], (), marks=pytest.mark.ci),
        pytest.param("Qwen3-MoE", ATTENTION, (), marks=pytest.mark.ci),
        pytest.param("Mistral", ["gate_proj", "down_proj"], (), marks=pytest.mark.ci),
    ],
)  # fmt: skip
def test_adapter_scores_equal_pefts(
    family: str, targets: list[str], overrides: tuple[str, ...], tmp_path: Path
) -> None:
    recipe, source, adapter, model = write_adapter(tmp_path, family, targets)
    options = ("--hf", str(source), f"model.adapter={adapter}", *overrides)
    run_command("score", recipe, *options, "--output", tmp_path / "scores.jsonl", code=0)
    assert worst_score(tmp_path / "scores.jsonl", model) <= 1e-5
    found, _ = run_once(load_recipe(recipe, [f"model.hf={source}", f"model.adapter={adapter}", *overrides]), gradients)
    run_command("verify", recipe, *options, "model.dtype=float64", code=0)
    sum(nll(model, row).sum() for row in rows()).backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): weight.grad.detach()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


@pytest.mark.parametrize(
    "layout", [(), pytest.param(TP2_SP, marks=pytest.mark.ci), pytest.param(PP2, marks=pytest.mark.ci)]
)
def test_adapter_is_exported_unchanged(layout: tuple[str, ...], tmp_path: Path) -> None:
    """A step that changes no bit lies between reading and writing."""
    recipe, source, adapter, _ = write_adapter(tmp_path, "Llama 3", ALL)
    exported = tmp_path / "exported"
    options = ("--hf", source, f"model.adapter={adapter}", STILL, f"checkpoint.export_hf={exported}", *layout)
    run_ranks(2 if layout else 1, "train", recipe, *options, code=0)
    expected, found = weights_in(adapter), weights_in(exported)
    assert found.keys() == expected.keys()
    assert not [name for name, weight in expected.items() if not torch.equal(weight, found[name])]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "layout"),
    [("Llama 3", TP2_SP), ("Qwen3", PP2), ("Qwen3-MoE", EP2), ("Qwen2.5", TP2), ("Llama 3", PP2)],
)
def test_layouts_train_as_one_process_does(family: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    """Tied embeddings of Qwen3 are on both stages, frozen."""
    targets = ATTENTION if layout == EP2 else ALL
    recipe, source, adapter, model = write_adapter(tmp_path, family, targets)
    options = ("--hf", source, f"model.adapter={adapter}", "train_iters=3", "optimizer.lr=0.001")
    logs, trained = [], []
    for ranks, further in ((1, ("verify.enabled=false",)), (2, layout)):
        log, exported = tmp_path / f"{ranks}.jsonl", tmp_path / f"exported {ranks}"
        outputs = (f"log.metrics={log}", f"checkpoint.export_hf={exported}")
        run_ranks(ranks, "train", recipe, *options, *further, *outputs, code=0)
        logs.append([json.loads(line) for line in log.read_text().splitlines()])
        trained.append(weights_in(exported))
    for one, other in zip(*logs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    for name, start in weights_in(adapter).items():
        moved = trained[0][name] - start
        assert float((trained[1][name] - trained[0][name]).norm()) <= 1e-2 * float(moved.norm()), name
    scores = tmp_path / "scores.jsonl"
    run_ranks(2, "score", recipe, *options, *layout, "--output", scores, code=0)
    assert worst_score(scores, model) <= 1e-5


def test_peft_reads_trained_adapters(tmp_path: Path) -> None:
    """Also after a resume and through ``export``; the checkpoints hold only adapters."""
    recipe, source, _ = write_job(tmp_path, "Llama 3")
    saved = f"checkpoint.save={tmp_path / 'run'}"
    lora = ("model.lora.r=4", "model.lora.target_modules=[q_proj,v_proj,down_proj]", "optimizer.lr=0.01")
    before = weights_in(source)
    for iterations in (1, 2):
        options = (saved, *lora, f"train_iters={iterations}", "optimizer.lr_decay_style=constant")
        exported = tmp_path / f"after {iterations}"
        done = run_command(
            "train", recipe, "--hf", source, "--resume", *options, f"checkpoint.export_hf={exported}", code=0
        )
    assert "resumed from" in done.output
    at_once = tmp_path / "at once"
    options = (*lora, "train_iters=2", "optimizer.lr_decay_style=constant", f"checkpoint.export_hf={at_once}")
    done = run_command("train", recipe, "--hf", source, *options, code=0)
    assert "with a new adapter" in done.output
    run_command("export", recipe, tmp_path / "again", "--hf", source, saved, *lora, code=0)
    files = [folder / "adapter_model.safetensors" for folder in (tmp_path / "again", exported, at_once)]
    states = [load_file(file) for file in files]
    assert len(states[0]) == 2 * 2 * 3
    for state in states[1:]:
        assert all(torch.equal(state[name], weight) for name, weight in states[0].items())
    size = sum(one.stat().st_size for one in (tmp_path / "run" / "iter_0000002").rglob("*") if one.is_file())
    assert size < sum(weight.nbytes for weight in before.values())
    losses = []
    for folder in (None, tmp_path / "after 1", exported):
        model = read_model(source)
        if folder is not None:
            model = peft.PeftModel.from_pretrained(model, folder).eval()
        with torch.no_grad():
            losses.append(float(sum(nll(model, row).sum() for row in rows())))
    assert losses[0] > losses[1] > losses[2]
    scores = tmp_path / "scores.jsonl"
    run_command("score", recipe, "--hf", source, saved, *lora, "--output", scores, "--reference", source, code=0)
    assert worst_score(scores, model) <= 1e-5
    assert worst_score(scores, read_model(source), column="ref_logprobs") <= 1e-5
